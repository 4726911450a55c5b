"""Takes the console's pictures for the documentation: ``python -m tools.console_pictures``.

The cluster runs already, without API keys: docs/how-to/operate/console.md has its commands.
The tool sends three kinds of traffic at once and drains a worker. It takes two pictures while that
worker still answers requests. Once another one has started it takes two more: of a what-if question
and of a grid of ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import matplotlib
from playwright.async_api import Locator, Page, async_playwright
from playwright.async_api import TimeoutError as PlaywrightTimeout

from tests.support.programs import Browser, chromium

IMAGES = Path(__file__).parent.parent / "docs" / "images"
WIDTH, HEIGHT = 1440, 3600
"""Size of the window for the pictures, in pixels. It must hold the whole page."""
_MARGIN = 14
_AGENTS, _TURNS, _SHARED_WORDS = 5, 400, 200
_BATON = (sys.executable, "-m", "baton")
_WORDS = ("ledger", "harbor", "invoice", "signal", "orchard", "meeting", "carbon", "valley")
_DRAIN_S, _DRAINS, _QUESTIONS = 120, 5, 15
_SHOWN_MS = 15_000
"""Maximum time until the page shows a drain."""


def agent_prompts(path: Path) -> None:
    """Write a file of prompts from a few agents. All prompts of an agent begin with the same long
    text."""
    chance = random.Random(1)  # noqa: S311 - text of a load, no secret
    systems = [" ".join(chance.choices(_WORDS, k=_SHARED_WORDS)) for _ in range(_AGENTS)]
    # The first agents are called more often, so that some workers hold the popular prefixes.
    weights = [_AGENTS - place for place in range(_AGENTS)]
    with path.open("w") as file:
        for turn in range(_AGENTS * _TURNS):
            (system,) = chance.choices(systems, weights)
            asked = f"Question {turn}: {' '.join(chance.choices(_WORDS, k=20))}?"
            file.write(json.dumps({"prompt": f"{system}\n{asked}", "output_tokens": 120}) + "\n")


def fonts(folder: Path, browser: Browser) -> Path:
    """Write a fontconfig file with fonts that have all characters of the console, such as
    triangles. Returns its folder."""
    own = Path(browser.environment["FONTCONFIG_PATH"], "fonts")
    more = Path(matplotlib.get_data_path(), "fonts", "ttf")
    folders = "".join(f"<dir>{one}</dir>" for one in (own, more))
    (folder / "fonts.conf").write_text(f"<fontconfig>{folders}</fontconfig>")
    return folder


def loads(prompts: Path, scale: float) -> dict[str, list[str]]:
    """Return the arguments of `baton bench serve`, by kind of traffic. `scale` multiplies all
    rates."""
    return {
        "chats": [
            *("--rate", f"{1.0 * scale}"),
            *("--input", "lognormal:150,0.6,500", "--output", "lognormal:300,0.4,600"),
        ],
        "agents": ["--rate", f"{0.9 * scale}", "--prompts", str(prompts)],
        "documents": [
            *("--rate", f"{0.2 * scale}"),
            *("--input", "normal:5200,600,7000", "--output", "lognormal:80,0.4,200"),
        ],
    }


async def take(arguments: argparse.Namespace) -> None:
    """Send the traffic, drain a worker, and take the four pictures."""
    url = f"http://{arguments.http}"
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        agent_prompts(folder / "agents.jsonl")
        for kind, options in loads(folder / "agents.jsonl", arguments.scale).items():
            command = [*_BATON, "bench", "serve", "--url", url, "--seconds", "3600", *options]
            log = stack.enter_context((folder / f"{kind}.log").open("w"))
            sent = await asyncio.create_subprocess_exec(*command, stdout=log, stderr=log)
            stack.callback(_end, sent)
        playwright = await stack.enter_async_context(async_playwright())
        found = chromium()
        # The browser's sandbox needs namespaces, which a container may not have.
        browser = await playwright.chromium.launch(
            executable_path=str(found.program),
            env={**os.environ, **found.environment, "FONTCONFIG_PATH": str(fonts(folder, found))},
            args=["--no-sandbox"],
        )
        stack.push_async_callback(browser.close)
        light = await _open(browser, url, "light")
        dark = await _open(browser, url, "dark")
        await asyncio.sleep(arguments.minutes * 60)

        for page in (light, dark):
            await page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
        row = light.locator("#worker-rows tr", has_text=arguments.drain)
        drained = await _drain(row, arguments)
        # Both pictures are taken at once, since a drain may last only seconds.
        await asyncio.gather(
            _picture(light, "#workers", "#latency", IMAGES / "console-light-workers.png"),
            _picture(dark, "header.bar", "#pools", IMAGES / "console-dark.png"),
        )
        await drained.wait()

        await row.get_by_text("ready").wait_for()
        prefill, decode = arguments.what_if.split("+")
        await _ask(light, prefill, decode)
        await _picture(light, "#what-if", "#what-if", IMAGES / "console-light-what-if.png")
        await light.get_by_role("button", name="Simulate the grid").click()
        await light.locator("#ratios-advice p").first.wait_for()
        await _picture(light, "#ratios", "#ratios", IMAGES / "console-light-ratios.png")


async def _drain(row: Locator, arguments: argparse.Namespace) -> asyncio.subprocess.Process:
    """Begin to drain the worker of this row, until the page shows it. Return the command."""
    drain = [*_BATON, "drain", arguments.drain, "--http", arguments.http, "--yes"]
    for _ in range(_DRAINS):
        # The worker must have several requests, so that it drains for long enough.
        await row.get_by_text(re.compile(r"^([4-9]|\d\d) / ")).wait_for()
        drained = await asyncio.create_subprocess_exec(*drain, "--deadline", str(_DRAIN_S))
        try:
            await row.get_by_text("draining").wait_for(timeout=_SHOWN_MS)
        except PlaywrightTimeout:
            # Its requests moved away before the page was drawn again.
            await drained.wait()
        else:
            return drained
    raise SystemExit(f"{_DRAINS} drains of {arguments.drain} ended before the page showed them")


def _end(process: asyncio.subprocess.Process) -> None:
    # The process may have ended by itself.
    with contextlib.suppress(ProcessLookupError):
        process.terminate()


async def _open(browser: Any, url: str, scheme: str) -> Page:
    # Drawing without a GPU takes the cores from the cluster: little of the page, and no motion.
    size = {"width": WIDTH, "height": 200}
    context = await browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce")
    page: Page = await context.new_page()
    page.set_default_timeout(300_000)
    await page.goto(f"{url}/console")
    return page


async def _ask(page: Page, prefill: str, decode: str) -> None:
    form = page.locator("#what-if-form")
    await form.locator("[name=prefill]").fill(prefill)
    await form.locator("[name=decode]").fill(decode)
    for _ in range(_QUESTIONS):
        # On a busy machine the simulation may take longer than the router allows.
        await form.get_by_role("button").click()
        await form.get_by_role("button", disabled=False).wait_for()
        if await page.locator("#what-if-result").is_visible():
            return
    raise SystemExit(await page.locator("#what-if-status").inner_text())


async def _picture(page: Page, first: str, last: str, path: Path) -> None:
    """Write a picture of the page to `path`, from the top of element `first` to the bottom of
    `last`."""
    top = await page.locator(first).bounding_box()
    bottom = await page.locator(last).bounding_box()
    if top is None or bottom is None:
        raise SystemExit(f"{first} or {last} is not on the page")
    whole = first != last
    begin = max(top["y"] - _MARGIN, 0)
    clip = {
        "x": 0 if whole else max(top["x"] - _MARGIN, 0),
        "y": begin,
        "width": WIDTH if whole else top["width"] + 2 * _MARGIN,
        "height": bottom["y"] + bottom["height"] + _MARGIN - begin,
    }
    await page.screenshot(path=path, clip=clip)  # type: ignore[arg-type]


def main() -> None:
    """Read the options and take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--http", default="127.0.0.1:8000", help="router of the cluster")
    parser.add_argument("--drain", default="decode-2", help="worker to drain")
    parser.add_argument(
        "--what-if",
        default="2+4",
        metavar="PREFILL+DECODE",
        help="numbers of workers of the question",
    )
    parser.add_argument("--minutes", type=float, default=4, help="traffic before the pictures")
    parser.add_argument("--scale", type=float, default=1, help="factor of all request rates")
    asyncio.run(take(parser.parse_args()))


if __name__ == "__main__":
    main()
