from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from chromium import CHROMIUM, opened
from workshop import Workshop, make_workshop


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    return make_workshop(tmp_path_factory.mktemp("workshop"))


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright isn't installed")
    with sync_api.sync_playwright() as playwright:
        # A container has neither the namespaces for Chromium's sandbox nor much shared memory.
        made = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield made
        made.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    yield from opened(browser)
