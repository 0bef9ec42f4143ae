"""A real Chromium, for the tests of pages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

CHROMIUM = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
NO_CHROMIUM = "there is no Chromium here (on Debian: apt-get install chromium), so the pages are not tested"


def opened(browser: Any, **options: Any) -> Iterator[Any]:
    """A page that fails on errors in its console and on any request that leaves its server or its file."""
    context = browser.new_context(**options)
    context.set_default_timeout(60_000)
    page = context.new_page()
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(message.text) if message.type in {"error", "warning"} else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on(
        "request",
        lambda sent: (
            wrong.append(sent.url) if not sent.url.startswith(("http://127.0.0.1:", "data:", "file:")) else None
        ),
    )
    yield page
    context.close()
    assert not wrong


def numbers_behind(page: Any, chart: str) -> list[list[str]]:
    """The table under a chart of a report: its head, then its rows."""
    details = page.locator(f"#chart-{chart} details")
    if not details.evaluate("one => one.open"):
        details.locator("summary").click()
    page.locator(f"#chart-{chart} tbody").wait_for()
    script = "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    return list(page.locator(f"#chart-{chart} tr").evaluate_all(script))


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
