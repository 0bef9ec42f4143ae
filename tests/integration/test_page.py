"""The page that ``arriero serve`` answers / with, in a real Chromium: as somebody with a mouse, a keyboard or a phone."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_model import CONTEXT, TEMPLATE, make_model, serving
from workshop import Workshop, arriero

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")
CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
pytestmark = pytest.mark.skipif(
    CHROMIUM is None,
    reason="there is no Chromium here (on Debian: apt-get install chromium), so the page is not tested",
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        # A container has neither the namespaces for Chromium's sandbox nor much shared memory.
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield made
        made.close()


@pytest.fixture(scope="module")
def run_url(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a run with three checkpoints."""
    arriero("train", workshop.recipe("page", train={"max_steps": 3}, checkpoint={"save_steps": 1}), "--nproc", 1)
    with serving(workshop.run("page"), log=tmp_path_factory.mktemp("log") / "log") as (url, _):
        yield url


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    yield from opened(browser)


def opened(browser: Any, **options: Any) -> Iterator[Any]:
    """A page that fails on errors in its console and on any request that leaves its server."""
    context = browser.new_context(**options)
    context.set_default_timeout(60_000)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda sent: wrong.append(sent.url) if not sent.url.startswith(("http://127.0.0.1:", "data:")) else None,
    )
    yield page
    context.close()
    assert not wrong


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


def contrast(one: str, other: str) -> float:
    """WCAG 2's contrast ratio of two hexadecimal colours."""

    def luminance(colour: str) -> float:
        digits = colour.removeprefix("#")
        parts = [digits[n] * 2 for n in range(3)] if len(digits) == 3 else [digits[n : n + 2] for n in (0, 2, 4)]
        red, green, blue = (
            value / 12.92 if (value := int(part, 16) / 255) <= 0.03928 else ((value + 0.055) / 1.055) ** 2.4
            for part in parts
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


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
