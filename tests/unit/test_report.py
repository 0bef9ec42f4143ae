"""report.html as a file: small whatever the run, its numbers unchanged, and nothing in it that could become markup."""

from __future__ import annotations

import http.client
import json
import math
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from made_runs import START_S, eval_row, eventful, make_run, skip_row, training_row, write_metrics
from typer.testing import CliRunner

from arriero.cli.main import app
from arriero.errors import UserError
from arriero.monitor.monitor import Monitor
from arriero.monitor.record import NOT_FINITE
from arriero.monitor.report import page_data, read_records, thin, write_report
from arriero.monitor.watch import open_server
from arriero.run_folder import RunFolder


def data_of(html: str) -> dict[str, Any]:
    """The runs that a page holds."""
    (text,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    return dict(json.loads(text))


def test_the_command_writes_one_file_that_asks_for_no_other(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", eventful())
    done = CliRunner().invoke(app, ["report", str(run), "--json"])
    assert done.exit_code == 0, done.output
    html = (run / "report.html").read_text(encoding="utf-8")
    assert json.loads(done.stdout) == {
        "path": str(run / "report.html"),
        "bytes": len(html.encode()),
        "runs": [str(run)],
        "rows": 300,
        "rows_shown": 300,
    }
    assert len(html.encode()) < 400_000
    # What the browser may load: its own script and style, nothing by address.
    assert not re.findall(r'(?:src|href)="(?!data:)', html)
    assert not re.findall(r"@import|url\(\s*['\"]?(?:https?:)?//|XMLHttpRequest|import\(", html)
    assert "{{" not in html
    assert "/* report" not in html
    (one,) = data_of(html)["runs"]
    assert one["name"] == "run"
    assert one["weights"] == {"code": 0.7, "prose": 0.3}
    assert "<script>throw 1" not in html, "texts can't end the script element"
    assert one["samples"][1]["text"].endswith("</script><script>throw 1</script>")


def test_a_hundred_thousand_steps_stay_below_two_megabytes(tmp_path: Path) -> None:
    rows = []
    for step in range(1, 100_001):
        row = training_row(step, START_S + step)
        if step == 77_777:
            row |= {"loss": 55.5, "grad_norm": 0.001}
        if step == 88_888:
            row |= {"loss": math.nan}
        rows.append(row)
        if step % 500 == 0:
            rows.append(eval_row(step, START_S + step))
        if step % 100 == 0:
            rows.append({"event": "checkpoint", "step": step, "time": START_S + step, "path": f"checkpoint-{step}"})
        if step % 10_000 == 0:
            rows.append(skip_row(step, START_S + step, "the loss is nan"))
    write_metrics(tmp_path, rows)
    report = write_report([tmp_path])
    assert report.size_bytes == report.path.stat().st_size < 2_000_000
    assert (report.rows, 4000 < report.rows_shown < 9000) == (100_000, True)
    (run,) = data_of(report.path.read_text(encoding="utf-8"))["runs"]
    training = run["training"]
    assert len({len(column) for column in training.values()}) == 1
    shown = dict(zip(training["step"], training["loss"], strict=True))
    assert shown[77_777] == 55.5
    assert shown[88_888] == NOT_FINITE
    assert 1 in shown
    assert 100_000 in shown
    # Every hundredth of the run keeps its own lowest and highest loss.
    for start in range(1, 100_001, 1000):
        part = [row["loss"] for row in rows if "event" not in row and start <= row["step"] < start + 1000]
        finite = [loss for loss in part if math.isfinite(loss)]
        kept = [shown[step] for step in range(start, start + 1000) if shown.get(step, NOT_FINITE) != NOT_FINITE]
        assert (min(kept), max(kept)) == (min(finite), max(finite))
    # Of 1,210 events those that say most.
    assert (len(run["events"]), run["events_total"]) == (600, 1210)
    assert sum(event["kind"] == "skip" for event in run["events"]) == 10
    assert run["figures"]["loss"] == training["loss"][-1] == training_row(100_000, 0)["loss"]


def test_thinning_changes_no_number_and_keeps_rows_whole() -> None:
    columns: dict[str, Any] = {
        "step": list(range(1000)),
        "loss": [math.sin(step) for step in range(1000)],
        "mfu": [step / 1000 for step in range(1000)],
        "loss/rare": [None if step % 7 else float(step) for step in range(1000)],
    }
    thinned = thin(columns, 100)
    steps = thinned["step"]
    assert 40 < len(steps) <= 100
    for key, column in columns.items():
        assert thinned[key] == [column[step] for step in steps]  # type: ignore[index]
    assert thin(columns, 1000) is columns
    assert thin({}, 10) == {}


def test_several_runs_and_where_they_differ(tmp_path: Path) -> None:
    first = make_run(tmp_path / "a" / "run", eventful())
    second = make_run(tmp_path / "b" / "run", [training_row(1, START_S)], learning_rate=3e-4)
    (second / "environment.json").write_text('{"python": "3.12.1", "device": "NVIDIA H100"}')
    data = page_data(read_records([first, second]))
    assert [run["name"] for run in data["runs"]] == ["run (1)", "run (2)"]
    assert data["differences"] == [
        {"key": "optim.learning_rate", "values": [6e-4, 3e-4]},
        {"key": "environment.python", "values": ["3.11.9", "3.12.1"]},
        {"key": "environment.packages", "values": [{"torch": "2.13.0"}, None]},
    ]
    out = tmp_path / "both.html"
    done = CliRunner().invoke(app, ["report", str(first), str(second), "--out", str(out)])
    assert done.output.startswith(f"{out}: 301 logged steps, 0.")
    assert [run["rows_shown"] for run in data_of(out.read_text(encoding="utf-8"))["runs"]] == [300, 1]


def test_refusals(tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="is no run folder"):
        write_report([tmp_path / "nothing"])
    run = make_run(tmp_path / "run", [])
    (run / "report.html").mkdir()
    with pytest.raises(UserError, match=r"report\.html can't be written"):
        write_report([run])
    with pytest.raises(UserError, match="--out has no meaning"):
        CliRunner().invoke(app, ["report", str(run), "--watch", "--out", "x.html"], catch_exceptions=False)


def test_watching_gives_what_is_new_and_only_to_this_machine(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [training_row(1, START_S)])
    with open_server([run], 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)

        def get(path: str, **headers: str) -> tuple[int, str, bytes]:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers["ETag"], answer.read()

        status, tag, body = get("/data.json")
        assert status == 200
        assert json.loads(body)["runs"][0]["training"]["step"] == [1]
        assert get("/data.json", **{"If-None-Match": tag})[::2] == (304, b"")
        write_metrics(run, [training_row(2, START_S + 1)])
        server_rests(server)
        status, newer, body = get("/data.json", **{"If-None-Match": tag})
        assert (status, json.loads(body)["runs"][0]["training"]["step"]) == (200, [1, 2])
        assert newer != tag
        page = get("/")[2].decode()
        assert data_of(page)["live"] is True
        assert data_of(page)["tag"] == newer
        assert get("/../run_state.json")[0] == 404
        assert get("/", Host="evil.example:80")[0] == 404
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(b"{\n")
        server_rests(server)
        status, _, body = get("/data.json")
        assert status == 503
        assert b"isn't JSON" in body
        (run / "metrics.jsonl").unlink()
        with pytest.raises(UserError, match="can't listen on"):
            open_server([run], server.server_port)
        connection.close()
        server.shutdown()


def server_rests(server: Any) -> None:
    """Let the pause after a reading pass: ten times as long as the reading took."""
    import time

    time.sleep(0.5)


@pytest.mark.parametrize("broken", [False, True], ids=["written", "not writable"])
def test_the_end_of_a_run_writes_it_and_survives_where_it_cannot(tmp_path: Path, broken: bool) -> None:
    run = RunFolder(make_run(tmp_path / "run", eventful()))
    if broken:
        run.report.mkdir()
    monitor = Monitor(run, rank=0, total_steps=300, title="", report_to=(), config={}, resumed_step=None)
    with monitor:
        monitor.report()
    note = run.log(0).read_text(encoding="utf-8")
    assert ("report.html could not be written (UserError: " in note) is broken
    assert (f"the run on one page: {run.report}" in note) is not broken
    assert run.report.is_file() is not broken
