"""``report.html`` in a real Chromium, as somebody with a mouse, a keyboard, a phone or a dark screen."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, NO_CHROMIUM, contrast, numbers_behind, opened
from made_runs import START_S, eventful, make_run, training_row, write_metrics

from arriero.monitor.metrics import latest_by_step, read_metrics
from arriero.monitor.report import write_report
from arriero.monitor.watch import open_server

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed once and rolled back once, with its report."""
    made = make_run(tmp_path_factory.mktemp("report") / "mule", eventful())
    write_report([made])
    return made


@pytest.fixture
def report(page: Any, run: Path) -> Any:
    page.goto((run / "report.html").as_uri())
    return page


def test_the_numbers_are_those_of_metrics_jsonl(report: Any, run: Path) -> None:
    rows = latest_by_step(read_metrics(run / "metrics.jsonl"))
    trained = [row for row in rows if "event" not in row]
    evaluated = {row["step"]: row for row in rows if row.get("event") == "eval"}
    assert report.title() == "mule · arriero"
    head, *shown = numbers_behind(report, "loss")
    assert head == ["step", "loss", "eval_loss"]
    spell = {None: "not finite"}
    expected = [["0", "", str(evaluated[0]["eval_loss"])]] + [
        [
            str(row["step"]),
            spell.get(row["loss"], str(row["loss"])),
            str(evaluated[row["step"]]["eval_loss"]) if row["step"] in evaluated else "",
        ]
        for row in trained
    ]
    assert shown == expected
    for chart, keys in {
        "rate": ["learning_rate"],
        "norm": ["grad_norm"],
        "speed": ["tokens_per_second"],
        "time": ["step_time_s", "data_time_s"],
        "mfu": ["mfu"],
        "memory": ["memory_bytes"],
        "sources-loss": ["loss/code", "loss/prose"],
    }.items():
        head, *shown = numbers_behind(report, chart)
        assert head == ["step", *keys]
        assert [[float(cell) for cell in line[1:]] for line in shown if "not finite" not in line] == [
            [row[key] for key in keys] for row in trained if row[keys[0]] is not None
        ], chart
    head, *shown = numbers_behind(report, "epochs")
    assert shown[-1] == ["300", "0.6", "1.2"]
    figures = {
        card.get_attribute("data-figure"): card.locator(".big").inner_text()
        for card in report.locator("[data-figure]").all()
    }
    last = trained[-1]
    assert figures["step"] == "300"
    assert float(figures["loss"]) == pytest.approx(last["loss"], rel=1e-3)
    assert float(figures["eval_loss"]) == pytest.approx(evaluated[300]["eval_loss"], rel=1e-3)
    assert figures["memory"] == "61 GiB"
    assert figures["hours"] == "6 min 40 s"
    assert figures["skipped"] == "3"
    assert report.locator("[data-plan=memory_bytes] td").all_inner_texts() == ["60 GiB", "61 GiB", "+1.67 %"]
    assert report.locator("[data-plan=step_time_s] td").all_inner_texts() == ["0.64 s", "0.669 s", "+4.53 %"]
    assert report.locator("#sources tbody tr").first.inner_text().split("\t")[:3] == ["code", "0.7", "0.6"]


def test_events_stand_on_the_time_line_and_in_words(report: Any) -> None:
    assert report.locator("#chart-timeline .plot text").all_text_contents()[-6:] == [
        "evaluation", "checkpoint", "skipped step", "rollback", "resume", "end",
    ]  # fmt: skip
    assert report.locator("#chart-timeline .mark, #chart-timeline .sign").count() == 4 + 3 + 3 + 1 + 2 + 1
    told = ["\t".join(line) for line in numbers_behind(report, "timeline")]
    assert any("the loss 9.5 is 4.1 times the usual 2.3. 64 rows: prose 0, prose 1" in line for line in told)
    assert any("from step 150 to checkpoint-100; rows 6400 to 9600 are passed over" in line for line in told)
    assert sum("taken back by a later resume" in line for line in told) == 2
    # Where a curve has no number, a cross at its top.
    assert report.locator("#chart-loss .sign.wrong").count() == 2, "step 220, and once more in what was taken back"
    assert report.locator("#chart-loss .when").count() == 3


def test_pointing_and_zooming(report: Any) -> None:
    plot, tip = report.locator("#chart-loss .plot"), report.locator("#chart-loss .tip")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    left, right, middle = box["x"] + box["width"] * 0.5, box["x"] + box["width"] * 0.75, box["y"] + 100
    report.mouse.move(left, middle)
    step = int(re.search(r"step (\d+)", tip.inner_text())[1])
    assert 120 < step < 180
    assert f"train: {training_row(step, 0)['loss']:.4g}".rstrip("0") in tip.inner_text()
    assert report.locator("#chart-norm .cross").count() == 1, "the other charts point at the same step"
    button = report.get_by_role("button", name="Whole run")
    assert button.is_disabled()
    report.mouse.down()
    report.mouse.move(right, middle, steps=3)
    report.mouse.up()
    shown = [int(line[0]) for line in numbers_behind(report, "norm")[1:]]
    assert abs(shown[0] - step) <= 1
    assert 65 < len(shown) < 85
    button.click()
    assert len(numbers_behind(report, "norm")) == 301
    # In a legend a curve can be put aside.
    report.locator("#chart-time").get_by_role("button", name="reading rows").click()
    assert report.locator("#chart-time .plot .curve.t1").count() == 0
    report.get_by_label("Smoothing").fill("0.9")
    assert report.locator("#chart-loss .curve.raw").count() == 1
    curve = report.locator("#chart-loss .plot .curve").last
    straight = curve.get_attribute("d")
    report.get_by_label("Logarithmic y").check()
    assert curve.get_attribute("d") != straight
    report.get_by_label("X axis").select_option("tokens")
    assert report.locator("#chart-loss .plot text").filter(has_text="10M").count() == 1
    report.get_by_label("X axis").select_option("hours")
    plot.hover()
    assert re.match(r"time 3\.\d+ min\n", tip.inner_text())


def test_by_keyboard_alone(report: Any) -> None:
    report.get_by_label("X axis").focus()
    order = []
    for _ in range(6):
        report.keyboard.press("Tab")
        order.append(report.evaluate("document.activeElement.id || document.activeElement.getAttribute('class')"))
    assert order[:3] == ["smooth", "log", "plot"], "the button for the whole run has nothing to do yet"
    plot = report.locator("#chart-norm .plot")
    plot.focus()
    said = report.locator("#said")
    for _ in range(3):
        report.keyboard.press("ArrowRight")
    assert said.inner_text() == f"step 3; Gradient norm: {training_row(3, 0)['grad_norm']:.4g}".rstrip("0")
    report.keyboard.press("End")
    assert said.inner_text().startswith("step 300; ")
    report.keyboard.press("Home")
    report.keyboard.press("+")
    assert report.get_by_role("button", name="Whole run").is_enabled()
    report.keyboard.press("0")
    assert report.get_by_role("button", name="Whole run").is_disabled()
    report.locator("#chart-timeline .plot").focus()
    report.keyboard.press("End")
    assert said.inner_text().endswith("completed: all 300 steps done")


def test_everything_has_a_name_and_enough_contrast(report: Any) -> None:
    nameless = report.evaluate(
        "[...document.querySelectorAll('input, select')].filter(one => !one.labels.length).map(one => one.id)"
    )
    assert nameless == []
    labels = report.evaluate("[...document.querySelectorAll('.plot')].map(one => one.getAttribute('aria-label'))")
    assert len(labels) == 13
    assert all(re.match(r".+\. .*: .*", label) for label in labels)
    for scheme in ("light", "dark"):
        report.get_by_label("Colours").select_option(scheme)
        by_choice = colours_of(report)
        report.get_by_label("Colours").select_option("auto")
        report.emulate_media(color_scheme=scheme)
        colours = colours_of(report)
        assert colours == by_choice
        for front in ("ink", "quiet", "bad", "good", "accent"):
            for back in ("ground", "card"):
                assert contrast(colours[front], colours[back]) >= 4.5, (scheme, front, back)
        for curve in range(8):
            assert contrast(colours[f"s{curve}"], colours["card"]) >= 3, (scheme, curve)
        assert contrast(colours["line"], colours["card"]) >= 3, "the edges of the controls"


def test_axe_finds_nothing(browser: Any, run: Path) -> None:
    """Deque's checker, with much of it unfolded, in both themes."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python isn't installed")
    for scheme in ("light", "dark"):
        # Its script is put into the page, which lets in none.
        for page in opened(browser, color_scheme=scheme, bypass_csp=True):
            page.goto((run / "report.html").as_uri())
            for place in ("#chart-timeline", "#recipe", "#samples"):
                for summary in page.locator(f"{place} details:not([open]) > summary").all()[::-1]:
                    summary.click()
            found = axe.Axe().run(page)
            assert found.violations_count == 0, found.generate_report()


def colours_of(page: Any) -> dict[str, str]:
    names = ["ground", "card", "ink", "quiet", "line", "accent", "bad", "good", *(f"s{number}" for number in range(8))]
    style = "getComputedStyle(document.documentElement).getPropertyValue('--{}').trim()"
    return {name: page.evaluate(style.format(name)) for name in names}


def test_chinese_on_a_phone_and_back(browser: Any, run: Path) -> None:
    for page in opened(browser, locale="zh-CN", viewport={"width": 360, "height": 740}):
        page.goto((run / "report.html").as_uri())
        assert page.evaluate("document.documentElement.lang") == "zh-CN"
        assert page.locator("#chart-loss h3").inner_text() == "损失"
        assert page.locator("#plans h2").inner_text() == "预测与实测"
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, "nothing hangs over the edge"
        chinese = set(page.evaluate("Object.keys(TEXTS.zh)"))
        assert chinese == set(page.evaluate("Object.keys(TEXTS.en)"))
        page.get_by_label("Language").select_option("en")
        assert page.locator("#chart-loss h3").inner_text() == "Loss"
        left = page.evaluate("document.querySelector('main').innerText.match(/[\u4e00-\u9fff]+/g)")
        assert left is None, "all of it is English now"


def test_samples_are_text(report: Any) -> None:
    newest = report.locator("#samples .sample")
    assert newest.first.inner_text() == "def area(r):\n    return 3.14159 * r ** 2  # 300\n"
    assert newest.nth(1).inner_text() == "The Andes carry <b>no</b> markup </script><script>throw 1</script>"
    assert report.locator("#samples summary").all_inner_texts() == ["Step 300", "Step 200", "Step 100"]
    report.get_by_text("Recipe (config.yaml)").click()
    assert "hidden_size: 2048" in report.locator("#recipe pre").first.inner_text()


def test_two_runs_side_by_side(page: Any, run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "llama", [training_row(step, START_S + step) for step in range(1, 200)], learning_rate=3e-4)  # fmt: skip
    page.goto(write_report([run, other], tmp_path / "both.html").path.as_uri())
    assert page.locator("h1").inner_text() == "2 runs side by side"
    assert page.locator("#differing tbody tr").all_inner_texts() == ["optim.learning_rate\t0.0006\t0.0003"]
    assert page.locator("#figures tbody th").all_inner_texts() == ["mule completed", "llama completed"]
    assert numbers_behind(page, "rate")[0] == ["step", "mule · learning_rate", "llama · learning_rate"]
    assert numbers_behind(page, "rate")[250][2] == "", "the shorter run has no numbers here"


def test_runs_with_little_in_them(page: Any, tmp_path: Path) -> None:
    def said(name: str, rows: list[dict[str, Any]]) -> str:
        write_metrics(tmp_path / name, rows)
        page.goto(write_report([tmp_path / name]).path.as_uri())
        return str(page.locator("#notes").inner_text())

    text = said("empty", [])
    assert "No training step has been logged yet." in text
    assert "Not in the run folder: config.yaml, run_state.json" in text
    assert page.locator(".plot").count() == 0
    said("one", [training_row(1, START_S)])
    assert page.locator("#chart-loss .dot").count() == 1
    assert numbers_behind(page, "loss")[1:] == [["1", str(training_row(1, 0)["loss"])]]
    said("nothing finite", [training_row(step, START_S, loss=float("nan")) for step in (1, 2)])
    assert "no values in this part" in page.locator("#chart-loss .plot").text_content()
    assert page.locator("#chart-loss .sign.wrong").count() == 2
    (tmp_path / "empty" / "run_state.json").write_text('{"status": "failed", "reason": "rank 1 was killed"}')
    page.goto(write_report([tmp_path / "empty"]).path.as_uri())
    assert page.get_by_role("alert").inner_text() == "rank 1 was killed"


def test_watching_a_run(browser: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [training_row(1, START_S)])
    (run / "run_state.json").write_text('{"status": "running", "reason": ""}')
    with open_server([run], 0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for page in opened(browser):
            page.goto(f"http://127.0.0.1:{server.server_port}/")
            assert "updated while the run goes on" in page.locator("#status").inner_text()
            page.locator("#chart-loss summary").click()
            page.get_by_label("Smoothing").fill("0.5")
            write_metrics(run, [training_row(step, START_S + step) for step in (2, 3)])
            page.locator("#chart-loss tbody tr").nth(2).wait_for()
            assert page.locator("#chart-loss tbody tr").all_inner_texts()[2] == f"3\t{training_row(3, 0)['loss']}"
            assert page.get_by_label("Smoothing").input_value() == "0.5", "what was set stays"
            (run / "run_state.json").write_text(json.dumps({"status": "completed", "reason": "all done"}))
            page.locator("#status").filter(has_text="completed all done").wait_for()
        server.shutdown()
