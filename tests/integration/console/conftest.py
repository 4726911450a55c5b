"""A browser, a small cluster behind it, and pages whose every complaint is kept."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, async_playwright

from tests.support.e2e.stage import Stage, console_stage
from tests.support.mini_cluster import valkey
from tests.support.models import make_tiny_model
from tests.support.programs import chromium
from tests.support.router.front_fakes import TEMPLATE

WAIT_MS = 60_000
OpenPage = Callable[..., AbstractAsyncContextManager[Page]]


@pytest.fixture(scope="session")
def console_redis() -> Iterator[str]:
    with valkey() as url:
        yield url


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template."""
    folder = make_tiny_model(tmp_path_factory.mktemp("console"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
async def stage(chat_model: Path, console_redis: str) -> AsyncIterator[Stage]:
    async with console_stage(chat_model, console_redis) as made:
        yield made


@pytest.fixture
async def open_page() -> AsyncIterator[OpenPage]:
    """Opens pages in a browser of their own; fails where one complained."""
    found = chromium()
    complaints: list[str] = []
    async with async_playwright() as playwright:
        # In a container root may not use namespaces, on which its sandbox rests.
        browser = await playwright.chromium.launch(
            executable_path=str(found.program),
            env={**os.environ, **found.environment},
            args=["--no-sandbox"],
            timeout=WAIT_MS,
        )

        @asynccontextmanager
        async def opened(url: str, **context: Any) -> AsyncIterator[Page]:
            size = {"width": 1440, "height": 1000}
            seen = await browser.new_context(**{"viewport": size, **context})
            seen.set_default_timeout(WAIT_MS)
            page = await seen.new_page()
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("console", lambda told: _note(told, complaints))
            await page.goto(url)
            yield page
            await seen.close()

        yield opened
        await browser.close()
    assert not complaints


def _note(told: Any, complaints: list[str]) -> None:
    # A refusal that the page shows to its reader is written to the browser's console too.
    if told.type in ("error", "warning") and "the server responded with" not in told.text:
        complaints.append(told.text)
