"""A real LLaMA continued on real Chinese text, and a folder that must come through a run unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from assets import smollm2, three_kingdoms
from safetensors.torch import load_file
from workshop import Workshop, arriero, metrics


@pytest.mark.assets
def test_smollm2_on_the_three_kingdoms(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    base = smollm2()
    chapters = json.loads(three_kingdoms().read_text(encoding="utf-8"))
    corpus = tmp_path / "sanguo.jsonl"
    corpus.write_text("".join(json.dumps({"text": chapter}) + "\n" for chapter in chapters), encoding="utf-8")
    prepared = arriero("prepare", corpus, "--tokenizer", base, "--out", tmp_path / "sanguo", "--json")
    result = json.loads(prepared.stdout)
    assert result["documents"] == 120
    assert result["tokens"] > 500_000
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        yaml.safe_dump(
            {
                "output_dir": str(tmp_path / "run"),
                "model": {"model_name_or_path": str(base)},
                "data": {"sources": [{"path": str(tmp_path / "sanguo")}], "seq_len": 128},
                "train": {
                    "global_batch_size": 4,
                    "per_device_train_batch_size": 4,
                    "max_steps": 4,
                    "precision": "bf16",
                },
                "optim": {"learning_rate": 1e-4, "warmup_steps": 1, "lr_scheduler_type": "constant_with_warmup"},
                "log": {"logging_steps": 1},
                "eval": {"eval_on_start": True, "max_rows": 4},
            }
        )
    )
    arriero("train", recipe)
    rows = metrics(tmp_path / "run")
    scores = [row["eval_loss"] for row in rows if row.get("event") == "eval"]
    assert scores[-1] < scores[0] - 0.05, scores

    # The first step's loss is the untouched model's own loss on the rows that `data show` names.
    shown = [json.loads(line) for line in arriero("data", "show", recipe, "--json").stdout.splitlines()]
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).eval()
    ids, targets, positions = (
        torch.tensor([row[key] for row in shown]) for key in ("input_ids", "targets", "position_ids")
    )
    with torch.no_grad():
        logits = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    first = next(row["loss"] for row in rows if row.get("loss"))
    assert abs(first - float(expected)) < 2e-3 * float(expected)

    final = tmp_path / "run" / "final"
    assert (final / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    before, after = AutoTokenizer.from_pretrained(base), AutoTokenizer.from_pretrained(final)
    for text in ("话说天下大势，分久必合", "  x\n\n\ty", "é e\u0301 👩‍👩‍👧", "1234567"):
        assert before(text).input_ids == after(text).input_ids
    trained, info = AutoModelForCausalLM.from_pretrained(final, output_loading_info=True)
    assert not info["missing_keys"]
    assert trained.num_parameters() == model.num_parameters() == 134_515_008


def test_a_folder_comes_through_unchanged_at_rate_zero_and_zero_3(workshop: Workshop, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(workshop.tokenizer)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 5,  # an embedding larger than the tokenizer is rightful and must not shrink
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    base = tmp_path / "base"
    LlamaForCausalLM(config).save_pretrained(base)
    tokenizer.save_pretrained(base)
    (base / "generation_config.json").write_text('{"do_sample": false, "temperature": 0.6, "top_p": 0.9}')
    recipe = workshop.recipe(
        "unchanged",
        model={"model_name_or_path": str(base), "config": None, "tokenizer": None},
        train={"max_steps": 1},
        optim={"learning_rate": 1e-30},
        parallel={"zero_stage": 3},
    )
    arriero("train", recipe, "--nproc", 2)
    before = load_file(base / "model.safetensors")
    after = load_file(workshop.run("unchanged") / "final" / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(tokenizer) + 5 == after["model.embed_tokens.weight"].shape[0]
