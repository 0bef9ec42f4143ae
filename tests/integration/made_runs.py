"""Run folders as training writes them, with everything that can happen to a run, of any length and without training."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import yaml

from arriero.config.load import load_recipe, recipe_yaml
from arriero.monitor.metrics import MetricsFile

START_S = 1_790_000_000.0
SOURCES = ("code", "prose")


def training_row(step: int, time: float, **changes: Any) -> dict[str, Any]:
    """A training line; its numbers swing with the step, and no two are alike."""
    loss = 2.2 + 6.8 * math.exp(-step / 40) + 0.05 * math.sin(step * 12.9898)
    speed = 98_000 + 900 * math.sin(step * 78.233)
    return {
        "step": step,
        "time": time,
        "loss": loss,
        "learning_rate": 6e-4 / (1 + step / 100),
        "grad_norm": 0.4 + 1.1 * math.exp(-step / 30) + 0.03 * math.cos(step * 4.1414),
        "skipped": False,
        "loss_scale": 1.0,
        "target_tokens": 65_000,
        "tokens": step * 65_536,
        "position": step * 64,
        "epoch": {name: round(step * (number + 1) / 500, 6) for number, name in enumerate(SOURCES)},
        "tokens_per_second": round(speed, 3),
        "step_time_s": round(65_536 / speed, 6),
        "data_time_s": 0.002,
        "checkpoint_time_s": 0.25 if step % 100 == 1 else 0.0,
        "mfu": round(0.41 * speed / 98_000, 4),
        "memory_bytes": 61 * 2**30 + min(step, 10) * 2**20,
        **{f"loss/{name}": loss + (number - 0.5) / 2 for number, name in enumerate(SOURCES)},
    } | changes


def eval_row(step: int, time: float) -> dict[str, Any]:
    loss = 2.25 + 6.8 * math.exp(-step / 40)
    row: dict[str, Any] = {"event": "eval", "step": step, "time": time, "seconds": 1.5}
    for name, its in {"": loss, "/code": loss - 0.3, "/prose": loss + 0.3}.items():
        row |= {
            f"eval_loss{name}": its,
            f"eval_perplexity{name}": math.exp(its),
            f"eval_bits_per_byte{name}": its * 0.4,
            f"eval_target_tokens{name}": 9000,
        }
    return row


def skip_row(step: int, time: float, reason: str) -> dict[str, Any]:
    rows = [{"source": "prose", "row": row, "epoch": 0, "documents": [row, row + 1]} for row in range(64)]
    return {"event": "skip", "step": step, "time": time, "reason": reason, "position": step * 64, "rows": rows}


def write_metrics(folder: Path, rows: list[dict[str, Any]]) -> None:
    with MetricsFile(folder / "metrics.jsonl") as file:
        for row in rows:
            file.write(row)


def eventful(steps: int = 300) -> list[dict[str, Any]]:
    """What a run logs that was killed at step 250 of 300 and goes on from 200, spikes at 150 and goes back to 100, and
    meets a loss that isn't a number at step 220; every second is a step, and two hours lie between its two starts."""
    time, rows = START_S, [eval_row(0, START_S)]

    def go(first: int, last: int, nan: int | None = None) -> None:
        nonlocal time
        for step in range(first, last + 1):
            time += 1
            rows.append(
                training_row(step, time, loss=math.nan, grad_norm=math.nan, skipped=True)
                if step == nan
                else training_row(step, time)
            )
            if step == nan:
                rows.append(skip_row(step, time, "the loss is nan"))
            if step % 100 == 0:
                rows.append(eval_row(step, time))
                path = f"checkpoint-{step}"
                rows.append(
                    {"event": "checkpoint", "step": step, "time": time, "path": path, "seconds": 2.5, "stall_s": 0.25}
                )

    go(1, 149)
    time += 1
    rows.append(training_row(150, time, loss=9.5, skipped=True))
    rows.append(skip_row(150, time, "the loss 9.5 is 4.1 times the usual 2.3"))
    back = {"step": 100, "time": time, "checkpoint": "checkpoint-100"}
    rows.append({"event": "rollback", **back, "from_step": 150, "passed_over": [6400, 9600]})
    rows.append({"event": "resume", **back})
    go(101, 250, nan=220)
    time += 7200
    rows.append({"event": "resume", "step": 200, "time": time, "checkpoint": "checkpoint-200"})
    go(201, steps, nan=220)
    planned = {"planned_memory_bytes": 60 * 2**30, "memory_bytes": 61 * 2**30}
    rows.append(
        {"event": "plan", "step": steps, "time": time, **planned, "planned_step_time_s": 0.64, "step_time_s": 0.669}
    )
    rows.append(
        {
            "event": "stop",
            "step": steps,
            "time": time,
            "status": "completed",
            "reason": f"all {steps} steps done",
        }
    )
    return rows


def make_run(folder: Path, rows: list[dict[str, Any]], *, learning_rate: float = 6e-4) -> Path:
    """A whole run folder with these lines."""
    folder.mkdir(parents=True)
    write_metrics(folder, rows)
    recipe = {
        "output_dir": str(folder),
        "model": {
            "tokenizer": "tokenizer",
            "config": {
                "hidden_size": 2048,
                "intermediate_size": 8192,
                "num_hidden_layers": 16,
                "num_attention_heads": 32,
                "num_key_value_heads": 8,
            },
        },
        "data": {
            "sources": [
                {"path": "data/code", "name": "code", "weight": 0.7},
                {"path": "data/prose", "name": "prose", "weight": 0.3},
            ],
            "seq_len": 1024,
        },
        "train": {"global_batch_size": 64, "max_steps": 300},
        "optim": {"learning_rate": learning_rate},
    }
    given = folder.parent / f"{folder.name}.yaml"
    given.write_text(yaml.safe_dump(recipe), encoding="utf-8")
    (folder / "config.yaml").write_text(recipe_yaml(load_recipe(given, [])), encoding="utf-8")
    (folder / "overrides.txt").write_text(f"optim.learning_rate={learning_rate}\n", encoding="utf-8")
    (folder / "ds_config.json").write_text('{"train_batch_size": 64}', encoding="utf-8")
    environment = {"python": "3.11.9", "device": "NVIDIA H100", "packages": {"torch": "2.13.0"}}
    (folder / "environment.json").write_text(json.dumps(environment), encoding="utf-8")
    state = {"status": "completed", "reason": "all 300 steps done", "step": 300, "tokens": 19_660_800}
    (folder / "run_state.json").write_text(
        json.dumps(state | {"last_checkpoint": "checkpoint-300", "exit_code": 0}), encoding="utf-8"
    )
    write_samples(folder)
    return folder


def write_samples(folder: Path) -> None:
    (folder / "samples").mkdir()
    with (folder / "samples" / "rank_0.jsonl").open("w", encoding="utf-8") as file:
        for step in (100, 200, 300):
            for prompt, text in (
                ("def area(", f"r):\n    return 3.14159 * r ** 2  # {step}\n"),
                ("The Andes", " carry <b>no</b> markup </script><script>throw 1</script>"),
            ):
                file.write(json.dumps({"step": step, "prompt": prompt, "text": text}) + "\n")
