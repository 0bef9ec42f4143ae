"""What a report knows of a run: its folder, read by the rule for resumes, whatever is missing or damaged."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from made_runs import START_S, eval_row, eventful, make_run, training_row, write_metrics

from arriero.errors import UserError
from arriero.monitor.metrics import latest_by_step, read_metrics
from arriero.monitor.record import NOT_FINITE, read_record


def test_curves_are_what_counts_after_resumes_and_a_rollback(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path / "run", eventful()))
    rows = [row for row in latest_by_step(read_metrics(tmp_path / "run" / "metrics.jsonl")) if "event" not in row]
    assert record.training["step"] == list(range(1, 301)) == [row["step"] for row in rows]
    for key in ("loss", "grad_norm", "learning_rate", "tokens_per_second", "loss/prose", "mfu", "memory_bytes"):
        assert record.training[key] == [row[key] if row[key] is not None else NOT_FINITE for row in rows]
    assert [step for step, loss in zip(record.training["step"], record.training["loss"], strict=True) if loss == NOT_FINITE] == [220]  # fmt: skip
    assert record.training["epoch/prose"][-1] == 1.2
    assert not {"position", "time", "target_tokens", "skipped"} & set(record.training)
    assert record.evaluation["step"] == [0, 100, 200, 300]
    assert record.evaluation["eval_bits_per_byte/code"][0] == eval_row(0, 0)["eval_bits_per_byte/code"]


def test_what_was_taken_back_is_kept_beside_them(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path / "run", eventful()))
    assert record.taken_back["step"] == [*range(101, 151), None, *range(201, 251)]
    assert record.taken_back["loss"][49] == 9.5
    assert record.taken_back["loss"][-31] == NOT_FINITE
    back = [(event["kind"], event["step"]) for event in record.events if event.get("taken_back")]
    assert back == [("skip", 150), ("skip", 220)]
    kinds = [event["kind"] for event in record.events]
    assert [kinds.count(kind) for kind in ("skip", "rollback", "resume", "checkpoint", "eval", "stop")] == [
        3, 1, 2, 3, 4, 1,
    ]  # fmt: skip
    skip = next(event for event in record.events if event["kind"] == "skip")
    assert skip["row_count"] == 64
    assert skip["named"] == ["prose 0", "prose 1", "prose 2", "prose 3"]
    assert "rows" not in skip


def test_time_stands_still_between_two_starts(tmp_path: Path) -> None:
    record = read_record(make_run(tmp_path / "run", eventful()))
    # 150 steps of a second, 150 more after the rollback, and 100 after the kill; two hours in between don't count.
    assert record.figures["hours"] * 3600 == pytest.approx(400, abs=0.01)
    hours = record.training["hours"]
    assert hours == sorted(hours)
    assert record.figures["began"] == START_S


def test_figures(tmp_path: Path) -> None:
    figures = read_record(make_run(tmp_path / "run", eventful())).figures
    assert figures["rows"] == figures["step"] == 300
    assert figures["tokens"] == 300 * 65_536
    assert figures["first_loss"] == training_row(1, 0)["loss"]
    assert figures["loss"] == training_row(300, 0)["loss"]
    assert figures["eval"]["eval_loss"] == figures["best_eval"]["eval_loss"] == eval_row(300, 0)["eval_loss"]
    assert (figures["skipped"], figures["rollbacks"], figures["resumes"], figures["not_finite"]) == (3, 1, 1, 1)
    assert figures["epochs"] == {"code": 0.6, "prose": 1.2}
    assert figures["peak_memory_bytes"] == 61 * 2**30 + 10 * 2**20


def test_fp16_overflows_are_events_too(tmp_path: Path) -> None:
    write_metrics(tmp_path, [training_row(1, 1.0, skipped=True, loss_scale=65536.0), training_row(2, 2.0)])
    record = read_record(tmp_path)
    (event,) = record.events
    assert (event["kind"], event["step"], event["loss_scale"]) == ("overflow", 1, 65536.0)


def test_folders_that_hold_little(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"neither config\.yaml nor metrics\.jsonl"):
        read_record(tmp_path)
    empty = tmp_path / "empty"
    write_metrics(empty, [])
    record = read_record(empty)
    assert record.training == {}
    assert record.figures["loss"] is None
    assert record.missing == ["config.yaml", "run_state.json", "overrides.txt", "environment.json", "ds_config.json"]
    one = tmp_path / "one"
    write_metrics(one, [training_row(1, START_S, loss=math.inf)])
    record = read_record(one)
    assert record.training["loss"] == [NOT_FINITE]
    assert (record.figures["rows"], record.figures["loss"], record.figures["not_finite"]) == (1, None, 1)
    planned = make_run(tmp_path / "planned", [])
    (planned / "metrics.jsonl").unlink()
    assert read_record(planned).missing == ["metrics.jsonl"]


def test_damaged_files_are_named_and_cost_only_their_part(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", eventful())
    (run / "run_state.json").write_text('{"status": "comp')
    (run / "environment.json").write_bytes(b"\xff\xfe")
    (run / "config.yaml").write_text("a: [")
    (run / "samples" / "rank_0.jsonl").write_text('{"step": 1, "prompt": "a", "text": "b"}\n{"step": 2}\n')
    record = read_record(run)
    assert sorted(record.damaged) == ["config.yaml", "environment.json", "run_state.json", "samples/rank_0.jsonl"]
    assert record.samples == [{"step": 1, "prompt": "a", "text": "b"}]
    assert len(record.training["step"]) == 300
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b"not json\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:\d+ isn't JSON"):
        read_record(run)


def test_samples_newest_first_the_last_of_two_and_cut(tmp_path: Path) -> None:
    write_metrics(tmp_path, [])
    (tmp_path / "samples").mkdir()
    lines = [{"step": step, "prompt": "p", "text": f"text {step}"} for step in range(1, 21)]
    lines += [{"step": 20, "prompt": "p", "text": "x" * 5000, "seed": 1}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "samples" / "a.jsonl").write_text(text + '{"step": 21, "prom')  # being written
    record = read_record(tmp_path)
    assert [one["step"] for one in record.samples] == list(range(20, 8, -1))
    assert record.sample_steps == 20
    assert record.samples[0] == {"step": 20, "prompt": "p", "text": "x" * 3000, "characters": 5000}
    assert record.damaged == []
