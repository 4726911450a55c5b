"""What an operator looks for in the console, in a real browser: history, events, tenants, the heat
map, many workers, ratios, and a cluster with certificates."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.async_playwright import Axe
from playwright.async_api import Error as BrowserError
from playwright.async_api import Page, Route, expect

from baton.config.access import KeyConfig, TenantConfig
from baton.config.tls import TlsConfig
from baton.security.tls import TlsFiles
from router.console.history import History
from router.console.rates import CounterWindow
from router.console.snapshot import ObservedWorker, snapshot_of
from router.http.sse import encode_events, to_json
from tests.integration.console.conftest import WAIT_MS, OpenPage
from tests.support.certificates import Authority
from tests.support.e2e.stage import Stage, admin, console_stage
from tests.support.router.looks import CONFIG, look, seen

expect.set_options(timeout=WAIT_MS)
PAINTED = """canvas => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let most = 0;
  for (let at = 3; at < data.length; at += 4) most = Math.max(most, data[at]);
  return most;
}"""


def console(stage: Stage) -> str:
    return f"{stage.url}/console"


async def live(page: Page) -> None:
    await expect(page.locator("#connection-text")).to_have_text("live")


async def test_a_reloaded_page_has_the_history(stage: Stage, open_page: OpenPage) -> None:
    """What happened before any page was opened, and again after a reload."""
    stage.console.broadcaster._unwatched_s = 0.5
    stage.console.start()
    await stage.ask(range(5))
    history = stage.console._collector.history
    await stage.cluster.until(lambda: len(history.shown()["points"]) >= 3)
    # The page gets one snapshot: all else that it shows is from before.
    stage.console.broadcaster._interval_s = 3600.0
    async with open_page(console(stage)) as page:
        for _ in range(2):
            await live(page)
            line = page.locator(".tile", has_text="Output tokens").locator(".line")
            await expect(line).to_have_attribute("d", re.compile(r"^M .* L .* L "))
            await page.get_by_text("Last ten minutes as a table").click()
            await expect(page.locator("#history-body tr").first).to_contain_text(
                re.compile(r"\d+:\d+:\d+")
            )
            await expect(page.locator("#log-rows")).to_contain_text("the log begins: 2 workers")
            await page.reload()


async def test_events_of_workers_and_requests(stage: Stage, open_page: OpenPage) -> None:
    """A worker joins, drains and leaves, another one is left out; only warnings on request."""
    async with open_page(console(stage)) as page:
        await live(page)
        log = page.locator("#log-rows")
        await expect(log).to_contain_text("the log begins: 2 workers, healthy")
        decode = next(pool for pool in stage.cluster.config.pools if pool.role == "decode")
        worker = await stage.cluster.start_worker(decode, "decode-1")
        await expect(log).to_contain_text("decode-1 joins as a decode worker")
        await worker.stop()
        await expect(log).to_contain_text(re.compile("decode-1 (has left|is gone)"))
        stage.cluster.metrics.left_out_workers.labels(worker="decode-0").inc()
        stage.cluster.metrics.moved_requests.labels(reason="decode_failed").inc(7)
        await expect(log).to_contain_text("the circuit breaker of decode-0 opens")
        await expect(log.locator("tr").first).to_contain_text(
            re.compile("7 requests move: their decode worker failed|the circuit breaker")
        )
        stage.cluster.metrics.readmitted_workers.labels(worker="decode-0").inc()
        await expect(log).to_contain_text("the circuit breaker of decode-0 closes")
        await page.reload()
        await expect(log).to_contain_text("decode-1 joins as a decode worker")
        await page.locator("#log-level").select_option("warnings and errors")
        await expect(log).not_to_contain_text("joins")
        await expect(log).to_contain_text("7 requests move")


async def test_the_heat_map_of_workers(stage: Stage, open_page: OpenPage) -> None:
    async with open_page(console(stage)) as page:
        await live(page)
        await stage.ask(range(3), prompt="Once upon a time " * 20)
        canvas = page.locator("#heat")
        await expect(canvas).to_have_attribute("aria-label", re.compile("^2 workers, 0 minutes"))
        assert await canvas.evaluate(PAINTED) > 0
        await page.get_by_text("Heat map as a table").click()
        rows = page.locator("#heat-rows tr")
        await expect(rows).to_have_count(2)
        await expect(rows.nth(1)).to_contain_text(re.compile(r"decode-0.*\d %"))
        await page.get_by_text("step time").click()
        await expect(rows.nth(1)).to_contain_text(re.compile(r"decode-0.*\d m?s"))
        await expect(page.locator("#heat-most")).to_contain_text(re.compile(r"\d m?s"))
        box = await canvas.bounding_box()
        assert box is not None
        await canvas.hover(position={"x": box["width"] - 4, "y": 4})
        await expect(page.locator("#heat-value")).to_contain_text("prefill-0, ")


def key_of(tenant: str) -> KeyConfig:
    return admin(f"key-of-{tenant}").model_copy(update={"tenant": tenant})


async def test_tenants(chat_model: Path, console_redis: str, open_page: OpenPage) -> None:
    """Configured tenants have a row, the others share one; refusals are counted."""
    tenants = TenantConfig(name="gold"), TenantConfig(name="silver")
    async with (
        console_stage(chat_model, console_redis, keys=(key_of("gold"),), tenants=tenants) as stage,
        open_page(console(stage)) as page,
    ):
        # Only a file of keys may have tenants that the configuration does not name.
        stage.console._access.set_keys((key_of("guest"),))
        await live(page)
        rows = page.locator("#tenant-rows tr")
        await expect(rows).to_have_count(3)
        await stage.ask(range(4), key="key-of-gold")
        await stage.ask(range(2), key="key-of-guest")
        # Tokens/s of the last ten seconds, which a slow browser may miss: the requests stay.
        cells = rows.filter(has_text="gold").locator("td")
        await expect(cells.nth(2)).not_to_have_text("0")
        await expect(rows.filter(has_text="other")).to_be_visible()
        await expect(rows.filter(has_text="silver").locator("td").nth(2)).to_have_text("0")
        refused = stage.cluster.metrics.tenants.of("gold", "")
        for _ in range(3):
            refused.ended("shed", "rate_limit_exceeded")
        await expect(cells.nth(4)).to_have_text("3")
        await expect(cells.nth(4)).to_have_class("number bad")


def shown(workers: Sequence[ObservedWorker]) -> bytes:
    """The begin of a stream about these workers."""
    made = snapshot_of(look(*workers), CounterWindow(60), CounterWindow(60), CONFIG)
    history = History()
    history.add(made)
    return encode_events([to_json({"history": history.shown()}), to_json(asdict(made))])


async def answer_events(page: Page, path: str, body: bytes) -> None:
    """Answer requests for a stream with ``body``."""

    async def answer(route: Route) -> None:
        await route.fulfill(body=body, content_type="text/event-stream")

    await page.route(f"**{path}*", answer)


async def test_hundreds_of_workers_are_sorted_and_filtered(
    stage: Stage, open_page: OpenPage
) -> None:
    prefill = [seen(f"prefill-{n}", running=n % 8) for n in range(100)]
    decode = [seen(f"decode-{n}", running=n % 8, waiting=n) for n in range(300)]
    decode[7] = seen("decode-7", is_up=False)
    async with open_page("about:blank") as page:
        await answer_events(page, "/console/events", shown([*prefill, *decode]))
        await page.goto(console(stage))
        rows = page.locator("#worker-rows tr")
        await expect(page.locator("#workers-note")).to_have_text("200 of 400")
        await expect(rows.first).to_contain_text("prefill-0")
        name = page.get_by_label("Name", exact=True)
        await name.fill("DECODE-29")
        await expect(rows).to_have_count(11)
        await name.fill("")
        await page.locator("#worker-filters [name=role]").select_option("decode")
        await page.get_by_role("button", name="Waiting").click()
        head = page.locator("#worker-head th", has_text="Waiting")
        await expect(head).to_have_attribute("aria-sort", "descending")
        await expect(rows.first).to_contain_text("decode-299")
        await page.get_by_role("button", name="Waiting").click()
        await expect(head).to_have_attribute("aria-sort", "ascending")
        await expect(rows.first).to_contain_text("decode-0")
        await page.locator("#worker-filters [name=state]").select_option("unreachable")
        await expect(rows).to_have_count(1)
        await expect(page.locator("#workers-note")).to_have_text("1 of 400")
        await expect(page.locator("#heat")).to_have_attribute(
            "aria-label", re.compile("^1 workers")
        )
        await page.locator("#worker-filters [name=pool]").select_option("prefill")
        await expect(page.get_by_text("No worker matches the filter.")).to_be_visible()


async def test_a_grid_of_ratios_is_simulated(stage: Stage, open_page: OpenPage) -> None:
    """By the real simulator. The tiny model's steps take less time than HTTP, so it may well not
    describe this cluster."""
    async with open_page(console(stage)) as page:
        await live(page)
        run = page.locator("#ratios-run")
        await run.click()
        await expect(page.locator("#ratios-status")).to_contain_text("try again when there is")
        await stage.ask(range(15))
        await run.click()
        await expect(page.locator("#ratios-status")).to_contain_text("Simulated from the latest 15")
        cells = page.locator("#ratios-rows td")
        # Up to two more; prefill workers compute all prompts here, so that one is the least.
        await expect(cells).to_have_count(9)
        await expect(cells.first).to_contain_text(re.compile(r"/s.*\d % in SLO.*TTFT \S+ m?s.*now"))
        await expect(cells.first).to_have_css("outline-style", "solid")
        await expect(page.locator("#ratios-checks tr")).to_have_count(3)
        await expect(page.locator("#ratios-advice")).to_contain_text(re.compile("Best|No advice"))
        await expect(run).to_have_text("Simulate the grid")


GRID = {
    "prefill": [1, 2, 3],
    "decode": [1, 2, 3],
    "present": {"prefill": 2, "decode": 2},
    "requests": 100,
    "seconds": 50.0,
    "autoscales": False,
}


def ratio_events(*, agrees: bool, best: tuple[int, int] = (3, 1)) -> bytes:
    """A simulation in which more prefill workers help, with ``best`` as the advice."""
    latency = {"p50": 0.1, "p95": 0.2}
    events: list[dict[str, Any]] = [{"grid": GRID}]
    for name in ("ttft_p95", "tpot_p95", "good_share"):
        good = agrees or name != "ttft_p95"
        check = {"figure": name, "simulated": 0.2, "measured": 0.2 if good else 0.1}
        events.append(check | {"ratio": 1.0 if good else 2.0, "agrees": good})
    events[1:] = [{"checks": events[1:]}]
    for prefill in (2, 1, 3):
        for decode in (2, 1, 3):
            cell: dict[str, Any] = {"prefill": prefill, "decode": decode, "good_share": prefill / 3}
            cell |= dict.fromkeys(("ttft_s", "tpot_s", "e2el_s"), latency)
            events.append({"cell": cell | {"shed_share": 0, "prefill_busy": 1, "decode_busy": 1}})
    shape = dict(zip(("prefill", "decode"), best, strict=True))
    told = {"shape": shape, "good_share": best[0] / 3}
    choice = told | {"commands": ["baton role decode-1 prefill"]} if agrees else None
    events.append({"advice": {"is_complete": True, "best": choice, "best_same": choice}})
    return encode_events(json.dumps(one) for one in events)


@asynccontextmanager
async def ratios(
    stage: Stage, open_page: OpenPage, *, agrees: bool, **context: Any
) -> AsyncIterator[Page]:
    """A page whose grid is simulated, with these results."""
    async with open_page("about:blank", **context) as page:
        await answer_events(page, "/console/ratios", ratio_events(agrees=agrees))
        await page.goto(console(stage))
        await live(page)
        await page.locator("#ratios-run").click()
        await expect(page.locator("#ratios-status")).to_contain_text("100 requests, of 50.0 s")
        yield page


async def test_the_best_ratio_is_named_with_its_commands(stage: Stage, open_page: OpenPage) -> None:
    async with ratios(stage, open_page, agrees=True) as page:
        advice = page.locator("#ratios-advice")
        await expect(advice).to_contain_text(
            "Best: 3 prefill + 1 decode, 2.0/s (100 %) instead of 1.3/s (67 %)."
        )
        await expect(advice.locator("pre")).to_have_text("baton role decode-1 prefill")
        assert await advice.locator("button").count() == 0, "the page changes nothing"
        cells = page.locator("#ratios-rows td")
        await expect(cells.nth(6)).to_contain_text("best")
        await expect(cells.nth(4)).to_contain_text("now")
        shades = await cells.evaluate_all(
            "nodes => nodes.map(node => node.classList[node.classList.length - 1])"
        )
        assert shades == ["shade-0"] * 3 + ["shade-1"] * 3 + ["shade-4"] * 3
        colors = await cells.evaluate_all(
            "nodes => nodes.map(node => getComputedStyle(node).backgroundColor)"
        )
        assert len(set(colors)) == 3
        await answer_events(page, "/console/ratios", ratio_events(agrees=True, best=(2, 1)))
        await page.locator("#ratios-run").click()
        await expect(advice).to_contain_text(
            "Best: 2 prefill + 1 decode, 1.3/s (67 %) as now, with 1 worker fewer."
        )


async def test_no_ratio_is_named_where_the_simulator_is_wrong(
    stage: Stage, open_page: OpenPage
) -> None:
    async with ratios(stage, open_page, agrees=False) as page:
        advice = page.locator("#ratios-advice")
        await expect(advice).to_contain_text("No advice: more than 30 % lie between")
        await expect(advice).to_contain_text("(TTFT p95)")
        assert await advice.locator("pre").count() == 0
        await expect(page.locator("#ratios-checks tr").first).to_contain_text("2.00 × ▲")
        cells = page.locator("#ratios-rows td")
        colors = await cells.evaluate_all(
            "nodes => nodes.map(node => getComputedStyle(node).backgroundColor)"
        )
        assert len(set(colors)) == 1, "figures without colors"


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.long)])
@pytest.mark.parametrize("agrees", [True, False])
async def test_ratios_are_accessible(
    stage: Stage, open_page: OpenPage, scheme: str, *, agrees: bool
) -> None:
    context = {"color_scheme": scheme, "bypass_csp": True}
    async with ratios(stage, open_page, agrees=agrees, **context) as page:
        found = await Axe().run(page)
        assert found.violations_count == 0, found.generate_report()


def browser_with(authority: Authority, stage: Stage) -> dict[str, Any]:
    """The context of a browser that shows a client's certificate of this authority."""
    files = TlsFiles.in_folder(authority.folder, "client")
    certificate = {
        "origin": stage.url,
        "certPath": str(files.certificate),
        "keyPath": str(files.key),
    }
    return {"ignore_https_errors": True, "client_certificates": [certificate]}


async def test_a_cluster_with_certificates(
    chat_model: Path, console_redis: str, tmp_path: Path, open_page: OpenPage
) -> None:
    """The page comes by HTTPS to browsers with a client's certificate alone, and workers' pages by
    mutual TLS. Files that cannot be used are an event."""
    authority, stranger = Authority(tmp_path), Authority(tmp_path, "stranger")
    tls = TlsConfig(folder=str(authority.folder), client_ca=str(authority.certificate))
    stage_of = console_stage(chat_model, console_redis, tls=tls, transport="grpc")
    async with (
        stage_of as stage,
        open_page(console(stage), **browser_with(authority, stage)) as page,
    ):
        for context in ({"ignore_https_errors": True}, browser_with(stranger, stage)):
            # Python's servers close such a connection without an alert, at any time.
            closed = r"net::ERR_(EMPTY_RESPONSE|SOCKET_NOT_CONNECTED|CONNECTION_(CLOSED|RESET))"
            with pytest.raises(BrowserError, match=closed):
                async with open_page(console(stage), **context):
                    pass
        assert page.url.startswith("https://")
        await live(page)
        asking = asyncio.create_task(stage.ask(range(3)))
        await page.get_by_text("Transfers as a table").click()
        await expect(page.locator("#transfer-rows tr")).to_contain_text(["prefill-0decode-0grpc"])
        await expect(page.locator("#transfers-note")).not_to_contain_text("sent no figures")
        await asking
        certificate = authority.folder / "router.pem"
        certificate.write_text("no certificate")
        log = page.locator("#log-rows")
        await expect(log).to_contain_text("the previous certificate stays in use: TLS with")
        await page.get_by_label("Your message").fill("Hello")
        await page.keyboard.press("Enter")
        await expect(page.locator("#chat-status")).to_contain_text("Answered: ")
