"""fp16 on a CPU that is told it computes it: the loss scale is found, logged, saved and restored; growth halves nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from workshop import Workshop, metrics

WORKER = Path(__file__).parents[1] / "parity/fp16_worker.py"


def launch(nproc: int, *arguments: object) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={nproc}", str(WORKER)]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return done.stdout


def training(run: Path) -> list[dict[str, Any]]:
    return [row for row in metrics(run) if "event" not in row]


def test_b08_skipped_updates_move_no_schedule_and_a_resume_is_exact(workshop: Workshop) -> None:
    recipe = workshop.recipe(
        "fp16",
        model={
            "config": {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
        },
        data={"sources": [{"path": str(workshop.dataset), "name": "code"}], "seq_len": 32},
        train={"precision": "fp16", "global_batch_size": 4, "max_steps": 12},
        checkpoint={"save_steps": 6},
        eval={"max_rows": 2},
        # From a scale that overflows at once to one that grows after every two updates that fit.
        deepspeed={"fp16": {"initial_scale_power": 30, "loss_scale_window": 2, "hysteresis": 1}},
    )
    run = workshop.run("fp16")
    launch(1, "train", recipe)
    rows = training(run)
    skipped = [row["skipped"] for row in rows]
    assert skipped[0], "a scale of 2³⁰ must overflow"
    assert not all(skipped)
    scales = [2.0**30, *(row["loss_scale"] for row in rows)]
    for before, after, row in zip(scales, scales[1:], rows, strict=False):
        assert after == before / 2 if row["skipped"] else after in (before, 2 * before)
        assert (row["grad_norm"] is None) == row["skipped"]
    # Update u takes the rate of update u, however many steps were skipped before it.
    applied = [row["learning_rate"] for row in rows if not row["skipped"]]
    assert applied[:2] == [0.5e-3, 1e-3][: len(applied)]
    first = skipped.index(False)
    assert {row["learning_rate"] for row in rows[: first + 1]} == {0.5e-3}
    log = (run / "logs/rank_0.log").read_text(encoding="utf-8")
    assert f"its update was skipped; loss scale {2**29:g}. Usual in the first steps" in log
    state = json.loads((run / "checkpoint-6/trainer_state.json").read_text())
    assert state["loss_scale_state"]["cur_scale"] == rows[5]["loss_scale"]
    assert (state["step"], state["updates"]) == (6, 6 - sum(skipped[:6]))

    for name in ("checkpoint-12", "final"):
        shutil.rmtree(run / name)
    launch(1, "train", recipe)
    keys = ("step", "loss", "grad_norm", "loss_scale", "learning_rate", "skipped")
    again = training(run)[12:]
    assert [[row[key] for key in keys] for row in again] == [[row[key] for key in keys] for row in rows[6:]]


def test_an_update_at_which_the_scale_doubles_is_a_whole_one(tmp_path: Path) -> None:
    launch(2, "scales", tmp_path / "scales.json")
    found = json.loads((tmp_path / "scales.json").read_text())
    for stage in (1, 3):
        fixed, growing = found[f"fixed {stage}"], found[f"growing {stage}"]
        assert growing["scale"] == 2.0**16, "it doubled twice in five steps"
        assert all(abs(a - b) < 1e-3 * b for a, b in zip(growing["norms"], fixed["norms"], strict=True))
        # 8e-4 where an update is made from half the gradient: rates are 1e-2.
        assert found[f"apart {stage}"] < 1e-5
        assert fixed["tables"] == growing["tables"] == ["torch.float32"] * len(fixed["tables"])
        assert fixed["tables"], "RoPE tables are buffers of the model"
