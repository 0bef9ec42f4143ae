"""The page that ``arriero serve`` answers / with, in a real Chromium: as somebody with a mouse, a keyboard or a phone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from chromium import CHROMIUM, NO_CHROMIUM, contrast, numbers_behind, opened
from small_model import CONTEXT, TEMPLATE, make_model, serving
from workshop import Workshop, arriero, metrics

WANDB = ["wandb"] if find_spec("wandb") else []
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=NO_CHROMIUM)]


@pytest.fixture(scope="module")
def run_url(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a run with three checkpoints, which W&B has seen where its client is installed."""
    recipe = workshop.recipe(
        "page", train={"max_steps": 3}, checkpoint={"save_steps": 1}, log={"report_to": ["tensorboard", *WANDB]}
    )
    done = arriero("train", recipe, "--nproc", 1, "--quiet", WANDB_MODE="offline")
    assert done.stdout == ""
    with serving(workshop.run("page"), log=tmp_path_factory.mktemp("log") / "log") as (url, _):
        yield url


def answers(page: Any) -> list[str]:
    return page.locator("article .text").all_text_contents()


def wait_for(page: Any, status: str) -> None:
    page.get_by_role("status").filter(has_text=status).wait_for()


def test_two_checkpoints_side_by_side(page: Any, run_url: str) -> None:
    page.goto(run_url)
    assert page.get_by_label("Model", exact=True).locator("option").all_text_contents() == [
        "page", "page@3", "page@2", "page@1",
    ]  # fmt: skip
    page.get_by_label("Prompt").fill("def ")
    page.get_by_label("Tokens at most").fill("12")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Beside it").select_option("page@1")
    page.get_by_role("button", name="Generate").click()
    wait_for(page, "Done.")
    assert page.locator("article h2").all_text_contents() == ["page", "page@1"]
    first, second = answers(page)
    assert first
    assert second
    for line in page.locator("article .figures").all_text_contents():
        assert re.fullmatch(r"\d+ tokens · \d+ tokens/s · first after \d+\.\d\d s · (end of text|token limit)", line), (
            line
        )
    # What the API says of the same model.
    sent = {"model": "page@1", "prompt": "def ", "max_tokens": 12, "temperature": 0}
    said = page.request.post(f"{run_url}/v1/completions", data=sent).json()["choices"][0]["text"]
    assert second == said
    # The last checkpoint is the final model.
    page.get_by_label("Beside it").select_option("page@3")
    page.get_by_role("button", name="Generate").click()
    wait_for(page, "Done.")
    assert len(set(answers(page))) == 1


def test_by_keyboard_alone(page: Any, run_url: str) -> None:
    page.goto(run_url)
    page.get_by_label("Model", exact=True).locator("option").first.wait_for(state="attached")
    page.get_by_label("Prompt").focus()
    page.keyboard.type("import os")
    seen = []
    for _ in range(7):
        page.keyboard.press("Tab")
        seen.append(page.evaluate("document.activeElement.id"))
    assert seen == ["max_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed", "go"]
    outline = page.evaluate(
        "getComputedStyle(document.activeElement).outlineStyle + getComputedStyle(document.activeElement).outlineWidth"
    )
    assert outline == "solid3px"
    page.get_by_label("Tokens at most").fill("100")
    page.keyboard.press("Control+Enter")
    page.locator("article .text").filter(has_text=re.compile(r"\S")).wait_for()
    page.keyboard.press("Escape")
    wait_for(page, re.compile("Stopped|Done"))
    assert page.get_by_role("button", name="Generate").is_enabled()


def test_every_control_has_a_name_and_enough_contrast(page: Any, run_url: str) -> None:
    page.goto(run_url)
    page.get_by_label("Model", exact=True).locator("option").first.wait_for(state="attached")
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].filter(one => !one.labels.length && "
        "!one.getAttribute('aria-labelledby')).map(one => one.id)"
    )
    assert nameless == []
    assert page.locator("[role=status]").count() == 1
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)
        colours = {
            name: page.evaluate(f"getComputedStyle(document.documentElement).getPropertyValue('--{name}').trim()")
            for name in ("ground", "card", "ink", "quiet", "line", "accent", "on-accent", "bad")
        }
        for front, back in (
            ("ink", "ground"), ("ink", "card"), ("quiet", "ground"), ("quiet", "card"), ("on-accent", "accent"), ("bad", "card"),
        ):  # fmt: skip
            assert contrast(colours[front], colours[back]) >= 4.5, (scheme, front, back)
        assert contrast(colours["line"], colours["card"]) >= 3, "the edges of the controls"
        assert contrast(colours["accent"], colours["ground"]) >= 3, "the mark of the focus"


def test_chinese_on_a_phone(browser: Any, run_url: str) -> None:
    for page in opened(browser, locale="zh-CN", viewport={"width": 360, "height": 740}):
        page.goto(run_url)
        assert page.title() == "arriero"
        assert page.evaluate("document.documentElement.lang") == "zh-CN"
        page.get_by_label("提示词").fill("def ")
        page.get_by_label("最多词元数").fill("5")
        page.get_by_role("button", name="生成").click()
        wait_for(page, "完成。")
        assert "个词元" in page.locator("article .figures").inner_text()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360, "nothing hangs over the edge"
        page.get_by_label("Language").select_option("en")
        assert page.get_by_role("button", name="Generate").is_visible()
        assert "tokens/s" in page.locator("article .figures").inner_text()


def test_a_chat_model_with_a_key_and_an_error(browser: Any, tmp_path: Path) -> None:
    model = make_model(tmp_path / "small", template=TEMPLATE)
    with serving(model, "--api-key", "sesame", log=tmp_path / "log") as (url, _):
        context = browser.new_context()
        page = context.new_page()
        answer = page.goto(url)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        wait_for(page, "This server wants its API key.")
        page.get_by_label("API key").fill("sesame")
        page.get_by_label("Prompt").fill("hello")
        page.get_by_label("Model", exact=True).locator("option").first.wait_for(state="attached")
        assert page.get_by_label("Beside it").is_hidden(), "there is one model"
        page.get_by_label("What the model is given").select_option("chat")
        page.get_by_label("Tokens at most").fill("4")
        page.get_by_role("button", name="Generate").click()
        wait_for(page, "Done.")
        page.get_by_label("Tokens at most").fill(str(CONTEXT))
        page.get_by_role("button", name="Generate").click()
        page.get_by_role("alert").filter(has_text=f"the model's context is {CONTEXT}").wait_for()
        wait_for(page, "Failed.")
        # What a model says, like its name and the prompt, is text and never markup.
        inside = page.evaluate(
            "(() => { const one = new Answer('<b>x</b>', '<i>y</i>'); one.event(JSON.stringify("
            "{choices: [{text: '<u>z</u>'}]}), 0); return one.box.innerHTML; })()"
        )
        assert all(f"&lt;{tag}&gt;" in inside and f"<{tag}>" not in inside for tag in "biu")
        context.close()


def test_training_leaves_its_report(browser: Any, workshop: Workshop, run_url: str) -> None:
    """The real run's page; what else a report shows is in test_report_page.py."""
    run = workshop.run("page")
    rows = metrics(run)
    for page in opened(browser):
        page.goto((run / "report.html").as_uri())
        data = json.loads(page.locator("#data").text_content())
        assert data["runs"][0]["training"]["loss"] == [row["loss"] for row in rows if "event" not in row]
        evaluation = [row["eval_loss"] for row in rows if row.get("event") == "eval"][-1]
        assert numbers_behind(page, "loss")[1:] == [
            [str(row["step"]), str(row["loss"]), str(evaluation) if row["step"] == 3 else ""]
            for row in rows
            if "event" not in row
        ]
        (plan,) = [row for row in rows if row.get("event") == "plan"]
        planned = page.locator("[data-plan=memory_bytes] td").first.inner_text()
        assert float(planned.removesuffix(" MiB")) == pytest.approx(plan["planned_memory_bytes"] / 2**20, rel=0.01)
    assert rows[-1]["event"] == "stop"
    assert [path.stem for path in (run / "trackers").glob("*")] == WANDB
    notes = run.joinpath("logs", "rank_0.log").read_text()
    assert "the run on one page" in notes
    assert "gets no more rows" not in notes
