"""From a checkpoint to what others read: Hugging Face folders, and DeepSpeed's universal layout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from assets import packages
from handmade import handmade_run
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig
from workshop import SHAPE, Workshop, arriero, metrics

from arriero.checkpoint.export import Export, export_checkpoint
from arriero.checkpoint.saved import SavedState
from arriero.data.tokenizer import load_tokenizer
from arriero.errors import UserError
from arriero.run_folder import RunFolder

SCRIPT = Path(__file__).with_name("universal_script.py")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    """Two ranks at ZeRO-3 in bf16, with activation checkpointing, a padded vocabulary and scaled rotary angles."""
    shape = {"vocab_size": 1088, "rope_parameters": LLAMA3_ROPE}
    recipe = workshop.recipe(
        "exported",
        model={"config": SHAPE | shape},
        train={"max_steps": 4, "precision": "bf16", "activation_checkpointing": True},
        optim={"learning_rate": 1e-2},
        parallel={"zero_stage": 3},
        checkpoint={"save_steps": 2},
    )
    arriero("train", recipe, "--nproc", 2)
    return workshop.run("exported")


def export(run: Path, out: Path, step: int = 4, **options: Any) -> Export:
    return export_checkpoint(run / f"checkpoint-{step}", RunFolder(run), out, **options)


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def exports(run: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Export]:
    """Without --dtype, which is as it was trained, and in fp32."""
    folder = tmp_path_factory.mktemp("exports")
    return {dtype: export(run, folder / str(dtype), dtype=dtype) for dtype in (None, "fp32")}


def test_every_tensor_has_the_asked_dtype(run: Path, exports: dict[str | None, Export]) -> None:
    for dtype, done in exports.items():
        expected = torch.float32 if dtype == "fp32" else torch.bfloat16
        written = tensors(done.path)
        assert {tensor.dtype for tensor in written.values()} == {expected}
        assert all(name.startswith(("model.", "lm_head.")) for name in written)
        with SavedState(run / "checkpoint-4") as saved:
            assert written.keys() == saved.parameters.keys()
            # From the masters, not from the bf16 copy.
            assert all(torch.equal(tensor, saved.read(name).to(expected)) for name, tensor in written.items())
        # fp32 masters, read as the bf16 model that was trained, are that model.
        assert done.max_logit_difference < 0.02


def test_older_transformers_find_what_they_read(exports: dict[str | None, Export]) -> None:
    config = json.loads((exports[None].path / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["rope_theta"] == LLAMA3_ROPE["rope_theta"]
    assert config["rope_scaling"] == {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["use_cache"] is True
    again = AutoConfig.from_pretrained(exports[None].path)
    assert again.rope_parameters == LLAMA3_ROPE
    assert again.dtype == torch.bfloat16


@pytest.mark.assets
def test_an_older_transformers_gives_the_same_logits_and_ids(
    run: Path, exports: dict[str | None, Export], tmp_path: Path
) -> None:
    old = packages("transformers-4.46.3", "transformers==4.46.3", "tokenizers==0.20.3", "huggingface-hub==0.36.0")
    folder = exports["fp32"].path
    text = "def f(x):\n    return  x é 中文"
    code = """
import json, sys, torch, transformers
from safetensors.torch import load_file, save_file
model, info = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
ids = load_file(sys.argv[2])["input_ids"]
save_file({"logits": model(ids, use_cache=False).logits.detach()}, sys.argv[3])
loaded = [str(model.dtype), [key for key in info if info[key]]]
print(json.dumps([transformers.__version__, *loaded, transformers.AutoTokenizer.from_pretrained(sys.argv[1])(sys.argv[4]).input_ids]))
"""
    probe, out = run / "checkpoint-4" / "probe.safetensors", tmp_path / "logits.safetensors"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), str(probe), str(out), text],
        env=os.environ | {"PYTHONPATH": str(old)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    ids = AutoTokenizer.from_pretrained(folder)(text).input_ids
    assert json.loads(done.stdout.splitlines()[-1]) == ["4.46.3", "torch.float32", [], ids]
    now = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        expected = now(load_file(probe)["input_ids"], use_cache=False).logits
    assert float((load_file(out)["logits"] - expected).abs().max()) < 1e-5


def test_shards_have_an_index_and_hold_everything_once(run: Path, tmp_path: Path) -> None:
    (result,) = [
        json.loads(line)
        for line in arriero(
            "export", run, "--out", tmp_path / "model", "--step", 2, "--max-shard-size", "100KB", "--json"
        ).stdout.splitlines()
    ]
    folder = tmp_path / "model"
    shards = sorted(name for name in result["files"] if name.endswith(".safetensors"))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    found = {}
    for shard in shards:
        with safe_open(folder / shard, framework="pt") as file:
            names = list(file.keys())
            found |= dict.fromkeys(names, shard)
        # One tensor alone may be larger.
        assert (folder / shard).stat().st_size < 102_000 or len(names) == 1
    assert index["weight_map"] == found
    assert index["metadata"]["total_size"] == 2 * result["parameters"]
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert "2 steps" in (folder / "README.md").read_text()
    assert model.config.vocab_size == 1088


def test_rows_beyond_the_tokenizer_are_never_generated(run: Path, workshop: Workshop) -> None:
    """Model and embedding keep their 1,088 rows; generation can't emit what no token stands for."""
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    model = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    assert model.get_input_embeddings().weight.shape[0] == 1088
    assert len(tokenizer) == 1024
    with torch.no_grad():
        model.lm_head.weight[1024:] = 100 * model.lm_head.weight[:64].abs()
        new = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=12, do_sample=True)
    assert int(new.max()) < 1024


def test_tokenizer_files_are_the_ones_that_were_given(run: Path, workshop: Workshop, tmp_path: Path) -> None:
    for file in workshop.tokenizer.iterdir():
        assert (run / "final" / file.name).read_bytes() == file.read_bytes()
    card = (run / "final" / "README.md").read_text()
    for part in ("4 steps", "4,096 tokens", "| code | 4,096 |", "zero_stage: 3", "perplexity", "bits per byte"):
        assert part in card


def test_a_continued_model_with_added_tokens(run: Path, workshop: Workshop, tmp_path: Path) -> None:
    """Five tokens more: the embedding, the configuration and the tokenizer agree on 1,093, in a tied model too."""
    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    config = LlamaConfig(**SHAPE, vocab_size=1024, tie_word_embeddings=True, max_position_embeddings=128)
    model = AutoModelForCausalLM.from_config(config)
    assert tokenizer.add_tokens(["<|one|>", "mule_train", "阿里耶罗", "Añadido", "  four"]) == 5
    tokenizer.chat_template = "{{ messages[0].content }}"
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(base)
    tokenizer.save_pretrained(base)
    arriero("prepare", workshop.corpus, "--tokenizer", base, "--out", tmp_path / "data")
    recipe = workshop.recipe(
        "added",
        model={"model_name_or_path": str(base), "config": None, "tokenizer": None},
        output_dir=str(tmp_path / "run"),
        data={"sources": [{"path": str(tmp_path / "data"), "name": "code"}]},
        train={"max_steps": 1},
    )
    arriero("train", recipe, "--nproc", 1)
    final = tmp_path / "run" / "final"
    for file in base.iterdir():
        if file.name.startswith(("tokenizer", "chat_template", "special")):
            assert (final / file.name).read_bytes() == file.read_bytes(), file.name
    again, loaded = AutoTokenizer.from_pretrained(final), AutoModelForCausalLM.from_pretrained(final)
    assert len(again) == loaded.config.vocab_size == loaded.get_input_embeddings().weight.shape[0] == 1029
    assert loaded.get_input_embeddings().weight is loaded.get_output_embeddings().weight
    assert "lm_head.weight" not in tensors(final)
    assert again.chat_template == tokenizer.chat_template
    probes = ["<|one|>", "mule_train", "阿里耶罗", "Añadido", "  four"]
    assert [len(again(text, add_special_tokens=False).input_ids) for text in probes] == [1] * 5
    for text in ["  x", "\n\n", "é", "e\u0301", "😀 123456", "a mule_train of\t阿里耶罗"]:
        assert again(text).input_ids == tokenizer(text).input_ids


def test_a_folder_of_somebody_elses_is_never_replaced(run: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="nothing that arriero exported"):
        export(run, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]
    shutil.copytree(run / "final", tmp_path / "model")
    done = export(run, tmp_path / "model", dtype="fp32")
    assert {tensor.dtype for tensor in tensors(done.path).values()} == {torch.float32}


def test_another_models_logits_are_refused(run: Path, workshop: Workshop, tmp_path: Path) -> None:
    """The proof can fail: a checkpoint whose weights are not those that its logits were taken from."""
    tokenizer = load_tokenizer(workshop.tokenizer)
    config = LlamaConfig(**SHAPE, vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=1)
    checkpoint = handmade_run(tmp_path / "run", config, tokenizer)
    probe = load_file(checkpoint / "probe.safetensors")
    probe["logits"][0, -1, 5] += 1.0
    save_file(probe, checkpoint / "probe.safetensors")
    with pytest.raises(UserError, match="differ from the trained one's by 1 "):
        export_checkpoint(checkpoint, RunFolder(tmp_path / "run"), tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"form": "onnx"}, "hf, gguf, universal"),
        ({"dtype": "int8"}, "bf16, fp16, fp32"),
        ({"max_shard_size": "5 apples"}, "5 apples"),
        ({"form": "gguf", "max_shard_size": "1GB"}, "--format hf"),
        ({"form": "universal", "dtype": "bf16"}, "fp32"),
    ],
)
def test_wrong_options_are_named(run: Path, tmp_path: Path, options: dict[str, str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        export(run, tmp_path / "model", **options)


def peak_bytes(checkpoint: Path, run: Path, out: Path, form: str) -> int:
    """Largest resident size of an export's processes together, files that they map included."""
    code = (
        "import sys; from pathlib import Path; from arriero.checkpoint.export import export_checkpoint as export; "
        "from arriero.run_folder import RunFolder; c, r, o, f = sys.argv[1:]; "
        "export(Path(c), RunFolder(Path(r)), Path(o), form=f)"
    )
    child = psutil.Popen([sys.executable, "-c", code, str(checkpoint), str(run), str(out), form])
    peak = 0
    while child.poll() is None:
        with suppress(psutil.NoSuchProcess):
            peak = max(peak, sum(one.memory_info().rss for one in (child, *child.children(recursive=True))))
        time.sleep(0.05)  # looking for children costs milliseconds each time
    assert child.returncode == 0
    return peak


def test_memory_stays_below_two_and_a_half_times_the_weights(workshop: Workshop, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(workshop.tokenizer)
    peaks, weights = [], 0
    for width, layers, forms in ((64, 1, ["hf"]), (1024, 4, ["hf", "universal"])):
        config = LlamaConfig(
            hidden_size=width,
            intermediate_size=3 * width,
            num_hidden_layers=layers,
            num_attention_heads=8,
            vocab_size=len(tokenizer),
            bos_token_id=0,
            eos_token_id=1,
        )
        run = tmp_path / str(width)
        checkpoint = handmade_run(run, config, tokenizer, std=0.02)
        with SavedState(checkpoint) as saved:
            weights = 4 * sum(torch.Size(entry["shape"]).numel() for entry in saved.parameters.values())
        peaks += [peak_bytes(checkpoint, run, tmp_path / f"{width}-{form}", form) for form in forms]
    assert weights > 200e6
    # What the libraries take is the same for the small one.
    assert max(peaks[1:]) - peaks[0] < 2.5 * weights, peaks


# ------------------------------------------------------------------------------------- DeepSpeed's universal layout


@pytest.fixture(scope="module")
def universal(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(run, tmp_path_factory.mktemp("universal") / "checkpoint", step=2, form="universal").path


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def loaded(request: Any, run: Path, universal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a plain DeepSpeed script holds after loading, at stages 1 to 3 in one launch."""
    out = tmp_path_factory.mktemp("loaded")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}"]
    probe = run / "checkpoint-2" / "probe.safetensors"
    done = subprocess.run(
        [*launch, str(SCRIPT), str(universal), str(run / "model"), str(probe), str(out)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return out


def plain_losses(run: Path) -> list[float]:
    """The same two losses by torch alone: masters and moments into a model and its AdamW, one update between them."""
    config = AutoConfig.from_pretrained(run / "model")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    checkpoint = run / "checkpoint-2"
    input_ids = load_file(checkpoint / "probe.safetensors")["input_ids"]
    rate = next(row["learning_rate"] for row in metrics(run) if row.get("step") == 3 and "learning_rate" in row)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=rate,
        betas=(0.9, 0.95),
        eps=1e-8,
    )
    with SavedState(checkpoint) as saved, torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.read(name))
            moments = {kind: saved.read(name, kind) for kind in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(2.0), **moments}
    losses = []
    for _ in range(2):
        loss = model(input_ids=input_ids, labels=input_ids, use_cache=False).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_masters_and_moments_are_bit_equal(run: Path, loaded: Path) -> None:
    for stage in (1, 2, 3):
        held = load_file(loaded / f"stage-{stage}.safetensors")
        with SavedState(run / "checkpoint-2") as saved:
            wanted = {f"{name}/{kind}" for name in saved.parameters for kind in ("master", "exp_avg", "exp_avg_sq")}
            assert held.keys() == wanted
            for key, tensor in held.items():
                name, kind = key.rsplit("/", 1)
                assert torch.equal(tensor, saved.read(name, kind)), f"stage {stage}: {key}"
                if kind == "exp_avg_sq":
                    assert bool(tensor.any())


def test_losses_steps_and_rates_go_on(run: Path, loaded: Path) -> None:
    report = json.loads((loaded / "report.json").read_text())
    expected = plain_losses(run)
    assert report.keys() == {"1", "2", "3"}
    for stage, one in report.items():
        # The first from the loaded weights, the second after an update with the loaded moments and their step.
        assert one["losses"] == pytest.approx(expected, abs=2e-5), stage
        assert one["adam_steps"] == [4.0]
        assert len(one["rates"]) == 1
        assert one["rates"][0] != 123.0
        assert one["global_steps"] == 4
        assert one["step_in_client_state"] == 2
    assert abs(expected[0] - expected[1]) > 1e-3


def test_nothing_in_it_needs_unpickling(universal: Path) -> None:
    files = list(universal.rglob("*.pt"))
    assert len(files) > 80
    for file in files:
        torch.load(file, weights_only=True)
    assert (universal / "latest_universal").read_text() == "global_step2"
