"""The whole road by its commands, on real text, and the JSON that scripts read."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from workshop import Workshop, arriero, metrics

PLAN_KEYS = {
    "steps",
    "tokens_per_step",
    "global_batch_size",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "dp",
    "parameters",
    "layout",
    "epochs",
}
ROW_KEYS = {
    "step", "rank", "micro_step", "position", "source", "row", "epoch", "documents",
    "input_ids", "targets", "position_ids",
}  # fmt: skip
TRAINING_KEYS = {
    "step", "time", "loss", "learning_rate", "grad_norm", "skipped", "loss_scale", "target_tokens", "tokens",
    "position", "epoch", "tokens_per_second", "step_time_s", "data_time_s", "checkpoint_time_s", "mfu", "memory_bytes",
}  # fmt: skip


def lines(done: Any) -> list[dict]:
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def run(workshop: Workshop) -> Path:
    """A finished run on two ranks in bf16."""
    recipe = workshop.recipe("road", train={"precision": "bf16"}, eval={"eval_on_start": True, "max_rows": 16})
    done = arriero("train", recipe, "--nproc", 2)
    assert "step 12/12" in done.stdout
    return workshop.run("road")


def test_prepare_says_what_it_did_and_does_it_once(workshop: Workshop) -> None:
    (result,) = lines(
        arriero(
            "prepare", workshop.corpus, "--tokenizer", workshop.tokenizer, "--out", workshop.dataset,
            "--validation-split", 0.05, "--json",
        )
    )  # fmt: skip
    keys = {"documents", "tokens", "skipped", "seconds", "mb_per_s", "engine", "cache_hit", "fingerprint"}
    assert keys <= result.keys()
    assert result["cache_hit"] is True
    assert result["engine"] == "gigatoken"
    assert result["tokens"] > 100_000


def test_dry_run(workshop: Workshop) -> None:
    (plan,) = lines(arriero("train", workshop.recipe("dry"), "--dry-run", "--nproc", 2, "--json"))
    assert plan.keys() >= PLAN_KEYS
    assert (plan["steps"], plan["gradient_accumulation_steps"], plan["dp"]) == (12, 2, 2)
    assert plan["tokens_per_step"] == 8 * 128
    assert "auto" not in json.dumps(plan["ds_config"])
    assert not workshop.run("dry").exists()


def test_data_show_of_two_ranks_is_what_one_rank_sees(workshop: Workshop) -> None:
    recipe = workshop.recipe("show")
    seen: dict[int, set] = {}
    for world in (1, 2):
        rows = [
            row
            for rank in range(world)
            for row in lines(
                arriero("data", "show", recipe, "--rank", rank, "--world-size", world, "--steps", 3, "--json")
            )
        ]
        assert all(row.keys() >= ROW_KEYS for row in rows)
        seen[world] = {(row["step"], row["source"], row["epoch"], row["row"]) for row in rows}
    assert seen[1] == seen[2]
    assert len(seen[1]) == 3 * 8
    row = rows[0]
    assert len(row["input_ids"]) == len(row["targets"]) == len(row["position_ids"]) == 128
    inside = [i for i in range(127) if row["targets"][i] != -100]
    assert inside
    assert all(row["targets"][i] == row["input_ids"][i + 1] for i in inside)


def test_data_show_of_a_dataset_reads_like_text(workshop: Workshop) -> None:
    assert "targets" in arriero("data", "show", workshop.dataset, "--seq-len", 64).stdout


def test_evaluating_leaves_model_and_data_untouched(workshop: Workshop, run: Path) -> None:
    """A run that evaluates every second step takes the same rows and ends with the same bytes as one that doesn't."""
    recipe = workshop.recipe(
        "watched",
        train={"precision": "bf16"},
        eval={"eval_steps": 2, "max_rows": 16},
        checkpoint={"save_steps": 4, "save_total_limit": 1, "keep_best": True},
    )
    arriero("train", recipe, "--nproc", 2)
    watched = workshop.run("watched")
    keys = ("step", "loss", "grad_norm", "position", "epoch", "learning_rate")
    steps = [[[row[key] for key in keys] for row in metrics(one) if "event" not in row] for one in (run, watched)]
    assert len(steps[0]) == 12
    assert steps[0] == steps[1]
    assert len([row for row in metrics(watched) if row.get("event") == "eval"]) == 6
    weights = [(one / "final" / "model.safetensors").read_bytes() for one in (run, watched)]
    assert weights[0] == weights[1]
    # One is kept as the newest, and the best: here it is the same, since the loss still falls.
    losses = {row["step"]: row["eval_loss"] for row in metrics(watched) if row.get("event") == "eval"}
    assert min(losses, key=lambda step: losses[step]) == 12
    listed = arriero("checkpoints", "list", watched).stdout.splitlines()
    assert [line.split()[0] for line in listed] == ["checkpoint-12"]
    assert listed[0].endswith(f"eval_loss {losses[12]:.4f}  best")


def test_run_folder(run: Path) -> None:
    for name in ("config.yaml", "overrides.txt", "ds_config.json", "environment.json", "run_state.json", "tb"):
        assert (run / name).exists(), name
    state = json.loads((run / "run_state.json").read_text())
    assert (state["status"], state["step"], state["exit_code"]) == ("completed", 12, 0)
    assert state["last_checkpoint"] == "checkpoint-12"
    assert state["tokens"] == 12 * 8 * 128
    assert {path.name for path in run.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-8", "checkpoint-12"}
    assert (run / "logs" / "rank_1.log").is_file()
    assert not list(run.glob("tmp-*"))


def test_metrics(run: Path) -> None:
    rows = metrics(run)
    training = [row for row in rows if "event" not in row]
    assert [row["step"] for row in training] == list(range(1, 13))
    assert all(row.keys() >= TRAINING_KEYS for row in training)
    assert training[-1]["loss"] < training[0]["loss"] - 0.1
    assert abs(training[0]["loss"] - 6.93) < 0.15  # ln 1024: nothing is known at first
    scores = [row for row in rows if row.get("event") == "eval"]
    assert [row["step"] for row in scores] == [0, 12]
    assert scores[1]["eval_bits_per_byte"] < scores[0]["eval_bits_per_byte"]
    plan, stop = rows[-2:]
    assert (plan["event"], stop["event"]) == ("plan", "stop")
    assert plan["memory_bytes"] >= training[-1]["memory_bytes"]  # of the fullest rank
    assert plan["step_time_s"] == pytest.approx(statistics.median(row["step_time_s"] for row in training[1:]), abs=1e-6)
    # A tiny model: the process is nearly all of it, and libraries are planned at 450 MiB.
    assert 0.4 < plan["planned_memory_bytes"] / plan["memory_bytes"] < 1.5
    assert plan.keys() >= {"planned_step_time_s"}


def test_eval_agrees_with_the_run(run: Path, workshop: Workshop) -> None:
    (result,) = lines(arriero("eval", run, "--data", workshop.dataset, "--seq-len", 128, "--max-rows", 16, "--json"))
    assert result.keys() >= {"loss", "perplexity", "bits_per_byte", "target_tokens", "sources"}
    last = [row for row in metrics(run) if row.get("event") == "eval"][-1]
    assert result["target_tokens"] == last["eval_target_tokens"]
    assert abs(result["loss"] - last["eval_loss"]) < 2e-3
    assert abs(result["bits_per_byte"] - last["eval_bits_per_byte"]) < 2e-3


def test_export_is_the_trained_model(run: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (result,) = lines(arriero("export", run, "--out", tmp_path / "model", "--dtype", "fp32", "--json"))
    assert result.keys() >= {"path", "parameters", "max_logit_difference", "files"}
    assert result["max_logit_difference"] < 0.05
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert sum(parameter.numel() for parameter in model.parameters()) == result["parameters"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.config.use_cache is True
    # From the masters, not from the bf16 copy.
    weight = model.model.layers[0].mlp.up_proj.weight
    assert not torch.equal(weight, weight.bfloat16().float())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer("  x\n\té", add_special_tokens=False).input_ids) == "  x\n\té"
    assert "12 steps" in (tmp_path / "model" / "README.md").read_text()


def test_generate(run: Path) -> None:
    arguments = ("generate", run, "--prompt", "def ", "--max-new-tokens", 12, "--temperature", 0)
    (first,) = lines(arriero(*arguments, "--ignore-eos", "--json"))
    assert first.keys() >= {"prompt", "text", "tokens", "tokens_per_second", "finish_reason"}
    assert (first["tokens"], first["finish_reason"], first["prompt"]) == (12, "length", "def ")
    streamed = arriero(*arguments, "--ignore-eos").stdout
    assert streamed.startswith("def ")
    assert streamed.removeprefix("def ").removesuffix("\n") == first["text"]
    # The last checkpoint is the same model, and exported on the way.
    (again,) = lines(arriero("generate", run / "checkpoint-12", *arguments[2:], "--ignore-eos", "--json"))
    assert again["text"] == first["text"]


def test_checkpoints_verify_names_the_damaged_one(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    assert all(row["intact"] for row in lines(arriero("checkpoints", "verify", copy, "--json")))
    victim = copy / "checkpoint-8" / "state-00001.safetensors"
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    done = arriero("checkpoints", "verify", copy, "--json", check=False)
    assert done.returncode == 1
    assert {row["step"]: row["intact"] for row in lines(done)} == {4: True, 8: False, 12: True}


def test_a_finished_run_started_again_says_so(run: Path, workshop: Workshop) -> None:
    before = (run / "checkpoint-12" / "manifest.json").read_bytes()
    arriero("train", workshop.folder / "road.yaml", "--nproc", 1)
    assert (run / "checkpoint-12" / "manifest.json").read_bytes() == before
    assert json.loads((run / "run_state.json").read_text())["status"] == "completed"


def test_data_seen(run: Path, workshop: Workshop) -> None:
    (now,) = lines(arriero("data", "seen", run, "--json"))
    assert now["step"] == 12
    assert now["sources"]["code"].keys() >= {"rows", "epochs", "documents_seen", "max_times"}
    assert now["sources"]["code"]["rows"] == 12 * 8
    # The same documents as in the rows that `data show` gives for those steps.
    recipe = workshop.folder / "road.yaml"
    shown = lines(arriero("data", "show", recipe, "--steps", 5, "--json"))
    (then,) = lines(arriero("data", "seen", run, "--step", 5, "--json"))
    assert then["sources"]["code"]["documents_seen"] == len({d for row in shown for d in row["documents"]})
    # One document by its place in the corpus, at the steps whose rows hold it.
    import pyarrow.parquet as pq

    (table,) = workshop.dataset.glob("documents-*.parquet")
    wanted = shown[0]["documents"][0]
    (origin,) = [
        entry for entry in pq.read_table(table).to_pylist() if (entry["split"], entry["index"]) == ("train", wanted)
    ]
    name = f"{origin['file']}:{origin['row']}"
    (answer,) = lines(arriero("data", "seen", run, "--step", 5, "--document", name, "--json"))
    expected = sorted((row["position"], row["step"]) for row in shown if wanted in row["documents"])
    assert [(one["position"], one["step"]) for one in answer["document"]] == expected
    refused = arriero("data", "seen", run, "--step", 500, check=False)
    assert refused.returncode == 2
    assert "checkpoint-12" in refused.stderr or "step 12" in refused.stderr
