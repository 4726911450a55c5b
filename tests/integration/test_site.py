"""The documentation site in a real browser: no page asks another host for anything."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from playwright.async_api import Page, async_playwright, expect

from tests.support.programs import chromium

ROOT = Path(__file__).parents[2]
WAIT_MS = 60_000
BUILD_S = 300
PAGES = (
    "index.html",
    "reference/configuration.html",
    "reference/http.html",
    "explanation/architecture.html",
    "how-to/operate/console.html",
)
"""Among them pages with images, long tables and blocks of code."""
Scheme = Literal["dark", "light"]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Write nothing."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy, so that a site of the reader stays as it is."""
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    program = Path(sys.executable).with_name("zensical")
    subprocess.run([program, "build"], cwd=folder, check=True, timeout=BUILD_S)
    return folder / "site"


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@asynccontextmanager
async def reader(scheme: Scheme, asked: list[str]) -> AsyncIterator[Page]:
    """A page of a browser that notes all addresses it asks for."""
    found = chromium()
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(
            executable_path=str(found.program),
            env={**os.environ, **found.environment},
            args=["--no-sandbox"],
            timeout=WAIT_MS,
        )
        context = await browser.new_context(
            color_scheme=scheme, viewport={"width": 1440, "height": 1000}
        )
        context.set_default_timeout(WAIT_MS)
        context.on("request", lambda request: asked.append(request.url))
        yield await context.new_page()
        await browser.close()


def outside(asked: list[str], address: str) -> list[str]:
    own = (f"{address}/", "data:", "blob:")
    return [url for url in asked if not url.startswith(own)]


@pytest.mark.parametrize("scheme", [pytest.param("dark", marks=pytest.mark.long), "light"])
async def test_no_page_asks_another_host(address: str, scheme: Scheme) -> None:
    asked: list[str] = []
    async with reader(scheme, asked) as page:
        for path in PAGES:
            await page.goto(f"{address}/{path}", wait_until="networkidle")
            await expect(page.locator("h1").first).to_be_visible()
            body = page.locator("body")
            shown = "slate" if scheme == "dark" else "default"
            await expect(body).to_have_attribute("data-md-color-scheme", shown)
    assert len(asked) > len(PAGES)
    assert outside(asked, address) == []


async def test_the_search_asks_no_other_host(address: str) -> None:
    asked: list[str] = []
    async with reader("light", asked) as page:
        await page.goto(f"{address}/index.html", wait_until="networkidle")
        await page.keyboard.press("/")
        await page.keyboard.type("kv_pool_mib")
        hit = page.get_by_role("link", name="Configuration").last
        await expect(page.locator("mark").first).to_be_visible()
        assert await hit.count()
        await page.wait_for_load_state("networkidle")
    assert any("search" in url for url in asked)
    assert outside(asked, address) == []


@pytest.mark.long
async def test_tables_are_not_wider_than_a_page(address: str) -> None:
    async with reader("light", []) as page:
        for path in PAGES:
            await page.goto(f"{address}/{path}", wait_until="networkidle")
            wide = await page.evaluate(
                "() => document.documentElement.scrollWidth > window.innerWidth"
            )
            assert not wide, path
