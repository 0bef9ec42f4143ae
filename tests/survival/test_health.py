"""A step whose loss or gradient is wrong moves nothing, is named, and the recipe's policy decides what follows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from workshop import Workshop, arriero, metrics

from arriero.checkpoint.save import _MEMORY_SHARE
from arriero.history import document_history, open_history

WORKER = Path(__file__).with_name("faulty_train.py")
BATCH = 8
# Steps 20 and 24 go wrong; on two ranks of micro-batches of two, position 2 of a step is rank 1's.
NAN, SPIKE = 19 * BATCH + 2, 23 * BATCH + 2
CASES: dict[str, dict[str, Any]] = {
    "skip-fp32-z0": {"faults": {NAN: "nan", SPIKE: 100.0}, "zero_stage": 0, "precision": "fp32"},
    "skip-bf16-z1": {"faults": {NAN: "nan", SPIKE: 100.0}, "zero_stage": 1, "precision": "bf16"},
    "skip-bf16-z2": {"faults": {NAN: "inf", SPIKE: 100.0}, "zero_stage": 2, "precision": "bf16"},
    "skip-bf16-z3": {"faults": {NAN: "nan", SPIKE: 100.0}, "zero_stage": 3, "precision": "bf16"},
    "rollback": {"faults": {SPIKE: 100.0}, "health": {"on_spike": "rollback"}, "memory_share": 0},
    "hopeless": {
        "faults": dict.fromkeys(range(SPIKE, 60 * BATCH), 100.0),
        "health": {"on_spike": "rollback"},
    },
    "stop": {"faults": {SPIKE: 100.0}, "health": {"on_spike": "stop"}},
    "never": {"faults": dict.fromkeys(range(60 * BATCH), "nan"), "health": {"max_consecutive_skips": 6}},
}


@pytest.fixture(scope="module")
def outcomes(workshop: Workshop) -> dict[str, dict]:
    cases = []
    for name, case in CASES.items():
        recipe = workshop.recipe(
            name,
            train={"max_steps": 30, "precision": case.get("precision", "fp32")},
            parallel={"zero_stage": case.get("zero_stage", 1)},
            checkpoint={"save_steps": 10, "save_total_limit": None},
            eval={"eval_steps": None, "max_rows": 4},
            health=case.get("health", {}),
        )
        share = case.get("memory_share", _MEMORY_SHARE)
        cases.append({"recipe": str(recipe), "faults": case["faults"], "memory_share": share})
    (workshop.folder / "cases.json").write_text(json.dumps(cases))
    out = workshop.folder / "outcomes.json"
    done = subprocess.run(
        [
            sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2",
            str(WORKER), str(workshop.folder / "cases.json"), str(out),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    return dict(zip(CASES, json.loads(out.read_text()), strict=True))


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith("skip")])
def test_a_bad_step_is_skipped_on_all_ranks_and_named(workshop: Workshop, outcomes: dict[str, dict], name: str) -> None:
    assert outcomes[name] == {"code": 0, "error": ""}
    rows = metrics(workshop.run(name))
    skips = [row for row in rows if row.get("event") == "skip"]
    assert [row["step"] for row in skips] == [20, 24]
    assert "the loss is" in skips[0]["reason"]
    assert "times the usual" in skips[1]["reason"]
    for skip in skips:
        assert skip["position"] == (skip["step"] - 1) * BATCH
        assert len(skip["rows"]) == BATCH
        assert all(row["source"] == "code" and row["documents"] for row in skip["rows"])
    steps = {row["step"]: row for row in rows if "loss" in row}
    assert [step for step, row in steps.items() if row["skipped"]] == [20, 24]
    # The schedule counts applied updates: the rate of a skipped one is taken by the next.
    assert steps[21]["learning_rate"] == steps[20]["learning_rate"]
    state = json.loads((workshop.run(name) / "checkpoint-30/trainer_state.json").read_text())
    assert (state["step"], state["updates"], state["position"]) == (30, 28, 30 * BATCH)
    assert (state["health"]["skipped"], state["health"]["skipped_in_row"]) == (2, 0)
    assert abs(steps[25]["loss"] - steps[23]["loss"]) < 0.5


def test_a_rollback_passes_over_the_rows_since_the_checkpoint(workshop: Workshop, outcomes: dict[str, dict]) -> None:
    assert outcomes["rollback"] == {"code": 0, "error": ""}
    run = workshop.run("rollback")
    rows = metrics(run)
    back = next(row for row in rows if row.get("event") == "rollback")
    assert (back["from_step"], back["step"], back["checkpoint"]) == (24, 20, "checkpoint-20")
    assert back["passed_over"] == [20 * BATCH, 24 * BATCH]
    state = json.loads((run / "checkpoint-30/trainer_state.json").read_text())
    assert state["passed_over"] == [[20 * BATCH, 24 * BATCH]]
    # Ten more steps behind the spike: no row of [20, 24) steps is trained on.
    assert (state["step"], state["position"], state["updates"]) == (30, 34 * BATCH, 30)
    again = [row["position"] for row in rows[rows.index(back) :] if "loss" in row]
    assert again == [(24 + n) * BATCH for n in range(1, 11)]
    # What was passed over was taken but not trained on, and `data seen` says so.
    (seen,) = [json.loads(line) for line in arriero("data", "seen", run, "--json").stdout.splitlines()]
    assert seen["passed_over"] == [[20 * BATCH, 24 * BATCH]]
    named = next(row for row in rows if row.get("event") == "skip")["rows"][0]["documents"][0]
    (origin,) = pq.read_table(
        workshop.dataset / "documents-00000.parquet", filters=[("index", "=", named), ("split", "=", "train")]
    ).to_pylist()
    history, document = open_history(run, None), f"{origin['file']}:{origin['row']}"
    taken = {one["position"] for one in document_history(replace(history, passed_over=[]), document)}
    trained = {one["position"] for one in document_history(history, document)}
    assert taken & set(range(20 * BATCH, 24 * BATCH))
    assert trained == taken - set(range(20 * BATCH, 24 * BATCH))


def test_a_save_that_training_waited_for_says_so(workshop: Workshop, outcomes: dict[str, dict]) -> None:
    """With no room for a copy of the state; the checkpoint that it went back to was written so."""
    assert outcomes["rollback"]["code"] == 0
    log = (workshop.run("rollback") / "logs/rank_0.log").read_text()
    assert "while checkpoint-10 was written: host memory has no room" in log
    assert "host memory has no room" not in (workshop.run("stop") / "logs/rank_0.log").read_text()


def test_a_spike_that_stays_ends_the_run(workshop: Workshop, outcomes: dict[str, dict]) -> None:
    assert outcomes["hopeless"]["code"] == 1
    assert "went back to checkpoint-20 3 times" in outcomes["hopeless"]["error"]


def test_the_policy_stop_stops_at_once(workshop: Workshop, outcomes: dict[str, dict]) -> None:
    assert outcomes["stop"]["code"] == 1
    assert outcomes["stop"]["error"].startswith("step 24: ")
    assert "health.on_spike is stop" in outcomes["stop"]["error"]
    assert not (workshop.run("stop") / "checkpoint-30").exists()


def test_a_run_without_any_update_ends_within_its_budget(workshop: Workshop, outcomes: dict[str, dict]) -> None:
    assert outcomes["never"]["code"] == 1
    assert "7 updates in a row were skipped" in outcomes["never"]["error"]
    assert not list(workshop.run("never").glob("checkpoint-*"))
