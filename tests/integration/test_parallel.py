"""Tensor, sequence and pipeline parallel runs by the command line: each goes on where the other stopped."""

from __future__ import annotations

import json

from workshop import Workshop, arriero, metrics

STEPS = {"tensor_parallel_size": 4, "sequence_parallel_size": 8, "pipeline_parallel_size": 12}
# Four ranks are two replicas; the pipeline's two ranks are one.
RANKS = {"tensor_parallel_size": 2, "sequence_parallel_size": 4, "pipeline_parallel_size": 2}


def test_a_run_goes_on_in_every_layout(workshop: Workshop) -> None:
    optim = {"learning_rate": 1e-3, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 2}
    straight = workshop.recipe("layouts-straight", optim=optim)
    arriero("train", straight, "--nproc", 1)
    for axis, steps in STEPS.items():
        recipe = workshop.recipe("layouts", optim=optim, parallel={axis: 2}, train={"max_steps": steps})
        arriero("train", recipe, "--nproc", RANKS[axis])
    expected = [row for row in metrics(workshop.run("layouts-straight")) if "loss" in row]
    rows = [row for row in metrics(workshop.run("layouts")) if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 13))
    for row, truth in zip(rows, expected, strict=True):
        assert abs(row["loss"] - truth["loss"]) < 1e-5 * truth["loss"], (row, truth)
        assert abs(row["grad_norm"] - truth["grad_norm"]) < 1e-3 * truth["grad_norm"], (row, truth)
        for counted in ("target_tokens", "tokens", "position", "epoch"):
            assert row[counted] == truth[counted], counted
    last = [[row for row in metrics(workshop.run(name)) if row.get("event") == "eval"][-1] for name in NAMES]
    assert last[0]["eval_target_tokens"] == last[1]["eval_target_tokens"]
    assert abs(last[0]["eval_loss"] - last[1]["eval_loss"]) < 1e-5 * last[1]["eval_loss"]


NAMES = ("layouts", "layouts-straight")


def test_a_dry_run_counts_replicas(workshop: Workshop) -> None:
    recipe = workshop.recipe("dry", parallel={"pipeline_parallel_size": 2})
    planned = json.loads(arriero("train", recipe, "--nproc", 4, "--dry-run", "--json").stdout)
    assert planned["dp"] == 2
    assert planned["layout"] == {
        "zero_stage": 1,
        "ranks": 4,
        "precision": "fp32",
        "tensor_parallel_size": 1,
        "sequence_parallel_size": 1,
        "pipeline_parallel_size": 2,
    }
    assert planned["gradient_accumulation_steps"] == 2
    assert planned["tokens_per_step"] == 8 * 128


def test_ranks_of_a_replica_are_shown_the_same_rows(workshop: Workshop) -> None:
    def shown(axis: str, rank: int) -> list[int]:
        recipe = workshop.recipe("shown", parallel={axis: 2})
        lines = arriero("data", "show", recipe, "--rank", rank, "--world-size", 4, "--json").stdout.splitlines()
        return [json.loads(line)["position"] for line in lines]

    assert shown("tensor_parallel_size", 1) == [0, 1, 4, 5]
    # DeepSpeed's pipeline numbers the ranks of a stage side by side.
    assert shown("pipeline_parallel_size", 1) == [2, 3, 6, 7]


def test_what_cannot_be_arranged_is_refused_before_anything_starts(workshop: Workshop) -> None:
    recipe = workshop.recipe("refused", parallel={"tensor_parallel_size": 4, "pipeline_parallel_size": 2})
    done = arriero("train", recipe, "--nproc", 2, check=False)
    assert done.returncode == 2, done.stderr
    for words in ("nearest: tensor_parallel_size 4 alone", "num_key_value_heads 2; nearest: 2", "nearest: 8 ranks"):
        assert words in done.stderr, done.stderr
    assert not (workshop.run("refused") / "config.yaml").exists(), "no run has begun"
