"""The console in a real browser, in front of a real small cluster."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Page, Response, expect

from baton.host.background import end_tasks
from tests.integration.console.conftest import WAIT_MS, OpenPage
from tests.support.e2e.stage import Stage, admin, console_stage
from tests.support.standing_engine import standing_engine

expect.set_options(timeout=WAIT_MS)
OUTLINE = "node => getComputedStyle(node).outlineStyle"
SIZES = {"wide": (1440, 1000), "narrow": (380, 800)}


def console(stage: Stage) -> str:
    return f"{stage.url}/console"


async def live(page: Page) -> None:
    await expect(page.locator("#connection-text")).to_have_text("live")


async def test_live_values_follow_requests(stage: Stage, open_page: OpenPage) -> None:
    async with open_page(console(stage)) as page:
        await live(page)
        await expect(page.locator("#health")).to_have_text("healthy")
        rows = page.locator("#worker-rows tr")
        await expect(rows).to_have_count(2)
        await expect(rows.first).to_contain_text("prefill-0")
        tile = page.locator(".tile", has_text="Output tokens")
        await expect(tile.locator(".value")).to_have_text("0")
        # Until the page has shown all of it, however long a browser takes.
        asking = asyncio.create_task(stage.ask(itertools.count(), max_tokens=20))
        try:
            await expect(tile.locator(".value")).not_to_have_text("0")
            ttft = page.locator(".tile", has_text="TTFT p95").locator(".value")
            await expect(ttft).to_contain_text(re.compile(r"\d m?s"))
            # A handoff was seen, and a dot went along its line.
            await expect(page.locator("#diagram .edge.busy")).to_have_count(1)
            await page.locator("#diagram .dot").first.wait_for(state="attached")
            await expect(rows.nth(1)).to_contain_text(re.compile(r"[1-9]\d* cached"))
            await expect(page.locator("#latency-rows tr").nth(1)).to_contain_text("short")
        finally:
            await end_tasks([asking])
        await page.get_by_text("Transfers as a table").click()
        transfers = page.locator("#transfer-rows tr")
        await expect(transfers).to_contain_text(["prefill-0decode-0shm"])
        await page.get_by_role("button", name="Pause").click()
        await expect(page.get_by_role("button", name="Resume")).to_be_visible()


async def test_chat_streams_an_answer_as_text(stage: Stage, open_page: OpenPage) -> None:
    async with open_page(console(stage)) as page:
        await live(page)
        question = "<img src=x onerror=alert(1)>"
        await page.get_by_role("spinbutton", name="Max tokens").fill("12")
        await page.get_by_label("Your message").fill(question)
        await page.keyboard.press("Enter")
        turns = page.locator("#chat-log li")
        await expect(turns.first.locator("p")).to_have_text(question)
        await expect(page.locator("#chat-status")).to_contain_text("Answered: ")
        assert await page.locator("#chat-log img").count() == 0
        assert await turns.nth(1).locator("p").text_content()
        await page.get_by_role("button", name="New chat").click()
        await expect(turns).to_have_count(0)


async def test_an_answer_can_be_stopped(
    stage: Stage, open_page: OpenPage, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_page(console(stage)) as page:
        await live(page)
        await page.get_by_role("spinbutton", name="Max tokens").fill("400")
        await page.get_by_label("Your message").fill("Go on for ever")
        # The tiny model would be at its end before a browser has pressed a second button.
        with standing_engine(stage.cluster, "decode-0", monkeypatch):
            await page.get_by_role("button", name="Send", exact=True).click()
            await page.get_by_role("button", name="Stop", exact=True).click()
            await expect(page.locator("#chat-status")).to_contain_text("Stopped")
        await expect(page.get_by_role("button", name="Send", exact=True)).to_be_enabled()
        await stage.cluster.until_idle()


async def test_what_if_is_answered(stage: Stage, open_page: OpenPage) -> None:
    async with open_page(console(stage)) as page:
        await live(page)
        simulate = page.get_by_role("button", name="Simulate", exact=True)
        await simulate.click()
        await expect(page.locator("#what-if-status")).to_contain_text("try again when there is")
        await stage.ask(range(15))
        await page.get_by_role("spinbutton", name="Prefill workers").fill("2")
        await page.get_by_role("spinbutton", name="Decode workers").fill("3")
        await simulate.click()
        await expect(page.locator("#what-if-status")).to_contain_text(
            "With 2 prefill + 3 decode the recent traffic would have a TTFT of"
        )
        await expect(page.locator("#what-if-rows tr").first).to_contain_text(
            re.compile(r"TTFT p50.*\d m?s.*\d m?s")
        )


def _asked_with(key: str) -> Callable[[Response], bool]:
    return lambda response: response.request.headers.get("authorization") == f"Bearer {key}"


async def test_keys(chat_model: Path, console_redis: str, open_page: OpenPage) -> None:
    """It asks for a key, keeps it for the tab alone, and says when it is no good."""
    keys = (admin("boss"),)
    async with (
        console_stage(chat_model, console_redis, keys=keys, require_key=True) as stage,
        open_page(console(stage)) as page,
    ):
        dialog = page.get_by_role("dialog", name="API key")
        await expect(dialog).to_be_visible()
        await expect(page.locator("#key-why")).to_contain_text("is required")
        field = page.get_by_label("Key", exact=True)
        await expect(field).to_be_focused()
        # Filled, not typed: this Chromium leaves the caret of every <input> where it was.
        await field.fill("half a k")
        # What a refused request does, and this button, is the same.
        await page.evaluate("document.getElementById('key-button').click()")
        await expect(page.locator("#key-why")).to_contain_text("needs an operator's")
        await expect(field).to_have_value("half a k")
        await field.fill("wrong")
        # The dialog is closed by then, and opens again once the answer is read.
        async with page.expect_response(_asked_with("wrong")):
            await page.keyboard.press("Enter")
        await expect(dialog).to_be_visible()
        await expect(field).to_be_focused()
        await expect(page.locator("#connection-text")).to_have_text("no access")
        await field.fill("boss")
        await page.keyboard.press("Enter")
        await expect(dialog).to_be_hidden()
        await live(page)
        kept: Any = await page.context.storage_state()
        assert "boss" not in str(kept), "not beyond the tab"
        await page.reload()
        await live(page)
        await page.get_by_label("Your message").fill("Hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("#chat-status")).to_contain_text("Answered: ")
        await page.get_by_role("button", name="Key", exact=True).click()
        await page.get_by_role("button", name="Forget").click()
        await expect(dialog).to_be_visible()


async def test_by_keyboard_alone(stage: Stage, open_page: OpenPage) -> None:
    async with open_page(console(stage)) as page:
        await live(page)
        await page.keyboard.press("Tab")
        await expect(page.get_by_role("link", name="Skip to the figures")).to_be_focused()
        await page.keyboard.press("Enter")
        await expect(page.locator("#main")).to_be_focused()
        reached: list[str] = []
        while "chat-text" not in reached:
            await page.keyboard.press("Tab")
            focused = page.locator(":focus")
            # A choice shows its focus at the words next to it.
            seen = page.locator(":focus, :focus + span")
            outlines = [await one.evaluate(OUTLINE) for one in await seen.all()]
            reached.append(await focused.get_attribute("id") or "")
            assert any(outline != "none" for outline in outlines), f"no focus seen at {reached}"
            assert len(reached) < 60, reached
        await page.keyboard.type("Hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("#chat-status")).to_contain_text("Answered: ")


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
@pytest.mark.parametrize("size", ["wide", pytest.param("narrow", marks=pytest.mark.long)])
async def test_accessibility(stage: Stage, open_page: OpenPage, scheme: str, size: str) -> None:
    """axe-core finds no fault, contrast included, and nothing is wider than the window."""
    width, height = SIZES[size]
    # axe is put into the page, which its policy would forbid.
    context = {
        "color_scheme": scheme,
        "viewport": {"width": width, "height": height},
        "bypass_csp": True,
    }
    async with open_page(console(stage), **context) as page:
        await live(page)
        await stage.ask(range(12))
        await expect(page.locator("#worker-rows tr")).to_have_count(2)
        await page.get_by_role("button", name="Simulate", exact=True).click()
        await expect(page.locator("#what-if-result")).to_be_visible()
        await page.get_by_role("button", name="Simulate the grid").click()
        await expect(page.locator("#ratios-advice p").first).to_be_visible()
        for summary in await page.locator("summary").all():
            await summary.click()
        found = await Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
        assert await page.evaluate("document.documentElement.scrollWidth") <= width


async def test_light_and_dark(stage: Stage, open_page: OpenPage) -> None:
    async def ground(page: Page) -> tuple[int, ...]:
        colour = await page.locator("body").evaluate(
            "node => getComputedStyle(node).backgroundColor"
        )
        return tuple(map(int, re.findall(r"\d+", colour)[:3]))

    async with open_page(console(stage), color_scheme="dark") as page:
        assert max(await ground(page)) < 64, "as the system has it"
        button = page.get_by_role("button", name=re.compile("^Theme"))
        await button.click()
        await expect(button).to_have_text("Theme: light")
        assert min(await ground(page)) > 200
        await page.reload()
        assert min(await ground(page)) > 200, "it is remembered"
        await button.click()
        await expect(button).to_have_text("Theme: dark")
        assert max(await ground(page)) < 64


async def test_a_router_that_disappears_is_reported(
    chat_model: Path, console_redis: str, open_page: OpenPage
) -> None:
    async with (
        console_stage(chat_model, console_redis) as stage,
        open_page(console(stage)) as page,
    ):
        await live(page)
        await stage.console.close()
        await expect(page.locator("#notice")).to_contain_text("The router does not answer")
        await expect(page.locator("#connection-text")).to_contain_text("again in")
