"""Who may see what, and how streams end."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.resources import files
from typing import Any, cast

import httpx
import pytest

from baton.store.registry import WorkerRecord
from router.access.access import Access
from router.console import api as console_api
from router.console.api import ConsoleApi
from router.console.what_if import WhatIfProgram
from router.dispatch.dispatcher import ClusterDispatcher
from router.http.sse import EventStream
from tests.support.router.access_access import bearer, key
from tests.support.router.front_fakes import (
    MODEL,
    Front,
    create_app,
    create_apps,
    make_front,
    plain_client,
    serve,
)
from tests.support.router.looks import record
from tests.support.router.what_if import recent

DEADLINE_S = 20.0
STATIC = files("router.console").joinpath("static")
FILES = [one.name for one in STATIC.iterdir()]


@dataclass
class FakeLink:
    """Stands for ``router.workers.worker_links.WorkerLink``."""

    record: WorkerRecord

    @property
    def engine_load(self) -> object:
        return self.record.load


class FakeCluster:
    """Stands for ``router.dispatch.dispatcher.ClusterDispatcher``: two workers whose pages do not
    answer."""

    transfer_line = (2.0, 0.5)

    @property
    def workers(self) -> FakeCluster:
        return self

    def all(self) -> list[FakeLink]:
        return [FakeLink(record("prefill-0")), FakeLink(record("decode-0"))]

    def is_up(self, link: FakeLink) -> bool:
        return True

    def health(self) -> tuple[str, str]:
        return "ok", ""


@dataclass
class Served:
    front: Front
    console: ConsoleApi
    access: Access
    http: httpx.AsyncClient


@asynccontextmanager
async def console(what_if: WhatIfProgram | None = None, **config: Any) -> AsyncIterator[Served]:
    front = make_front(**config)
    access = Access(front.config, front.metrics)
    cluster = cast(ClusterDispatcher, FakeCluster())
    shown = ConsoleApi(cluster, front.stats, front.config, "tiny", access, what_if)
    shown.broadcaster._interval_s = 0.02
    parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    async with (
        serve(create_app(*parts, more=(shown,))) as address,
        plain_client(base_url=f"http://{address}", timeout=DEADLINE_S) as client,
    ):
        try:
            yield Served(front, shown, access, client)
        finally:
            await shown.close()


async def test_the_page_and_its_files_need_no_key() -> None:
    async with console(keys=(key("reads", "metrics"),), require_key=True) as served:
        for path in ("/console", "/console/", *(f"/console/static/{name}" for name in FILES)):
            answer = await served.http.get(path)
            assert answer.status_code == 200, path
            policy = answer.headers["content-security-policy"]
            assert policy.startswith("default-src 'none'")
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = await served.http.get(path, headers={"if-none-match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        page = (await served.http.get("/console")).text
        for asked in re.findall(r'(?:src|href)="(/[^"]+)"', page):
            assert (await served.http.get(asked)).status_code == 200, asked
        for name in ("nothing.js", "api.py", "..%2fapi.py", "__init__.py"):
            assert (await served.http.get(f"/console/static/{name}")).status_code == 404


def test_the_page_loads_nothing_from_other_sites() -> None:
    """No address of another host, no style or script within the page, no HTML made of strings."""
    known = {"http://www.w3.org/2000/svg"}
    for name in FILES:
        text = STATIC.joinpath(name).read_text()
        assert set(re.findall(r"https?://[^\s\"']+", text)) <= known, name
        if name.endswith(".js"):
            assert not re.search(
                r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
            )
    page = STATIC.joinpath("console.html").read_text()
    assert not re.search(r"<style|\sstyle=|\son[a-z]+=|<script(?![^>]*src=)", page)


async def test_console_data_requires_keys() -> None:
    """To read takes one for metrics, to make the router work an admin's."""
    keys = key("asks", "inference"), key("reads", "metrics"), key("rules", "admin")
    async with console(keys=keys, require_key=True) as served:
        for path in ("/console/snapshot", "/console/events"):
            refused = await served.http.get(path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            plain = await served.http.get(path, headers=bearer("asks"))
            assert plain.status_code == 403
        asked = {"prefill": 1, "decode": 1}
        for path in ("/console/what-if", "/console/ratios"):
            for name, status in (("", 401), ("reads", 403), ("rules", 404)):
                answer = await served.http.post(path, json=asked, headers=bearer(name))
                assert answer.status_code == status, (path, name)
        found = await served.http.get("/console/snapshot", headers=bearer("reads"))
        assert found.status_code == 200
        assert [one["slot"] for one in found.json()["workers"]] == ["prefill-0", "decode-0"]
        assert found.json()["pages_missing"] == 2
        assert served.console.broadcaster.viewers == 0


async def test_the_console_is_at_the_admin_listener_alone() -> None:
    front = make_front(admin_http="127.0.0.1:0")
    access = Access(front.config, front.metrics)
    cluster = cast(ClusterDispatcher, FakeCluster())
    shown = ConsoleApi(cluster, front.stats, front.config, "tiny", access)
    parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    apps = create_apps(*parts, more=(shown,))
    assert apps.admin is not None
    for app, status in ((apps.http, 404), (apps.admin, 200)):
        async with serve(app) as address, plain_client(base_url=f"http://{address}") as client:
            for path in ("/console", "/console/static/console.js", "/console/snapshot"):
                assert (await client.get(path)).status_code == status, path
            assert (await client.get("/health")).status_code == 200
            if status == 200:
                assert (await client.get("/console/snapshot")).json()["chat"] is False
    await shown.close()


async def lines_of(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        if line:
            yield json.loads(line.removeprefix("data: "))


async def test_events_are_described_as_what_they_are() -> None:
    async with console() as served:
        paths = (await served.http.get("/openapi.json")).json()["paths"]
        described = paths["/console/events"]["get"]["responses"]["200"]["content"]
        assert described.keys() == {"text/event-stream"}


async def test_a_stream_ends_when_its_key_is_revoked() -> None:
    reads = key("reads", "metrics")
    async with console(require_key=True) as served, asyncio.timeout(DEADLINE_S):
        served.access.set_keys((reads,))
        asked = served.http.stream("GET", "/console/events", headers=bearer("reads"))
        async with asked as stream:
            assert stream.headers["content-type"].startswith("text/event-stream")
            told = lines_of(stream)
            assert (await anext(told))["model"] == "tiny"
            served.access.set_keys(())
            last = [event async for event in told][-1]
        assert last["error"]["code"] == "invalid_api_key"
        while served.console.broadcaster.viewers:
            await asyncio.sleep(0.01)


async def test_snapshots_end_with_the_last_viewer() -> None:
    async with console() as served, asyncio.timeout(DEADLINE_S):
        async with served.http.stream("GET", "/console/events") as stream:
            told = lines_of(stream)
            await anext(told)
            assert served.console.broadcaster.viewers == 1
        while served.console.broadcaster.viewers:
            await asyncio.sleep(0.01)


async def test_a_stream_begins_with_what_happened_before() -> None:
    async with console() as served, asyncio.timeout(DEADLINE_S):
        # A first viewer comes and goes.
        assert (await served.http.get("/console/snapshot")).status_code == 200
        async with served.http.stream("GET", "/console/events?history=true") as stream:
            told = lines_of(stream)
            history = (await anext(told))["history"]
            assert [point["waiting"] for point in history["points"]] == [0]
            (column,) = history["columns"][-1:]
            assert column["workers"].keys() == {"prefill-0", "decode-0"}
            snapshot = await anext(told)
            assert snapshot["figures"]["waiting"] == 0
            begun = (await anext(told))["log"]
            assert begun[0]["text"] == "the log begins: 2 workers, healthy"
            served.front.metrics.key_file_failures.inc()
            while not (log := (await anext(told)).get("log")):
                pass
            assert [one["kind"] for one in log] == ["keys"], "only what is new"


async def test_a_router_that_stops_ends_streams() -> None:
    async with console() as served, asyncio.timeout(DEADLINE_S):
        async with served.http.stream("GET", "/console/events") as stream:
            told = lines_of(stream)
            await anext(told)
            await served.console.close()
            last = [event async for event in told][-1]
        assert "stopping" in last["error"]["message"]


async def test_a_viewer_that_does_not_read_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_api, "SLOW_VIEWER_S", 0.05)
    sent = 0

    async def send(message: Any) -> None:
        nonlocal sent
        sent += 1
        if sent > 2:
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    async with console() as served, asyncio.timeout(DEADLINE_S):
        await EventStream(partial(served.console._stream, {}, False))({}, receive, send)
        assert sent == 3
        assert served.console.broadcaster.viewers == 0


def shape_answer(prefill: int, decode: int, good_share: float = 1.0) -> dict[str, Any]:
    return {
        "prefill": prefill,
        "decode": decode,
        "ttft_s": {"p50": 0.1, "p95": 0.2},
        "tpot_s": {"p50": 0.1, "p95": 0.2},
        "e2el_s": {"p50": 0.1, "p95": None},
        "good_share": good_share,
        "shed_share": 0.0,
        "prefill_busy": None,
        "decode_busy": 0.5,
    }


SIMULATOR = f"""
import json, sys
answer = {shape_answer(0, 0)!r}
for shape in json.load(sys.stdin)["shapes"]:
    good = 1.0 if shape["prefill"] > 1 else 0.5
    print(json.dumps(answer | shape | {{"good_share": good}}), flush=True)
"""
"""A program that answers at once: half of the requests are good with up to one prefill worker."""


def have_traffic(front: Front, *, ttft_s: float) -> None:
    """Twelve requests have just ended, every other one was good."""
    now = asyncio.get_running_loop().time()
    for number, one in enumerate(recent(12)):
        front.stats.recent.add(
            replace(one, received_at=now, ttft_s=ttft_s, tpot_s=0.2, is_good=number % 2 == 0)
        )


async def test_what_if() -> None:
    async with console(WhatIfProgram((sys.executable, "-c", SIMULATOR))) as served:
        asked = {"prefill": 2, "decode": 2, "rate": 1.5}
        early = await served.http.post("/console/what-if", json=asked)
        assert early.status_code == 400
        assert "try again when there is more traffic" in early.json()["error"]["message"]
        have_traffic(served.front, ttft_s=0.2)
        answer = await served.http.post("/console/what-if", json=asked)
        shapes = [shape_answer(1, 1, 0.5), shape_answer(2, 2)]
        assert answer.json() == {"requests": 12, "seconds": 0.0, "shapes": shapes}
        for bad in (
            {"prefill": 2},
            {"prefill": -1, "decode": 1},
            {"prefill": 1, "decode": 0},
            {"prefill": 1, "decode": 1000},
            asked | {"rate": 0},
            asked | {"more": 1},
        ):
            refused = await served.http.post("/console/what-if", json=bad)
            assert refused.status_code == 400, bad


async def grid_events(served: Served) -> list[dict[str, Any]]:
    async with served.http.stream("POST", "/console/ratios") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        return [event async for event in lines_of(stream)]


async def test_a_grid_of_ratios() -> None:
    async with console(WhatIfProgram((sys.executable, "-c", SIMULATOR))) as served:
        early = await served.http.post("/console/ratios")
        assert (early.status_code, early.json()["error"]["code"]) == (400, "invalid_value")
        have_traffic(served.front, ttft_s=0.2)
        grid, checks, *cells, last = await grid_events(served)
        assert (grid["grid"]["prefill"], grid["grid"]["decode"]) == ([0, 1, 2, 3], [1, 2, 3])
        assert [check["ratio"] for check in checks["checks"]] == [1, 1, 1]
        assert len(cells) == 12
        assert (cells[0]["cell"]["prefill"], cells[0]["cell"]["decode"]) == (1, 1)
        advice = last["advice"]
        assert advice["is_complete"]
        assert advice["best"]["shape"] == {"prefill": 2, "decode": 1}
        assert advice["best"]["commands"] == ["baton scale prefill 2"]
        assert advice["best_same"]["commands"] == []


async def test_a_simulator_that_differs_from_the_cluster_gives_no_advice() -> None:
    async with console(WhatIfProgram((sys.executable, "-c", SIMULATOR))) as served:
        have_traffic(served.front, ttft_s=0.3)
        _, checks, *_, last = await grid_events(served)
        assert [check["agrees"] for check in checks["checks"]] == [False, True, True]
        assert (last["advice"]["best"], last["advice"]["best_same"]) == (None, None)


async def test_a_grid_at_its_deadline_advises_on_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slow = SIMULATOR + "    import time; time.sleep(0 if shape['prefill'] < 3 else 600)\n"
    monkeypatch.setattr(console_api, "GRID_DEADLINE_S", 2.0)
    async with console(WhatIfProgram((sys.executable, "-c", slow))) as served:
        have_traffic(served.front, ttft_s=0.2)
        *_, last = await grid_events(served)
        assert not last["advice"]["is_complete"]
        assert last["advice"]["best"]["shape"] == {"prefill": 2, "decode": 1}


async def test_a_grid_ends_with_its_connection() -> None:
    program = WhatIfProgram((sys.executable, "-c", SIMULATOR + "    import time; time.sleep(600)"))
    async with console(program) as served, asyncio.timeout(DEADLINE_S):
        have_traffic(served.front, ttft_s=0.2)
        async with served.http.stream("POST", "/console/ratios") as stream:
            # Kept: the end of the iterator would end the stream.
            told = lines_of(stream)
            await anext(told)
            again = await served.http.post("/console/ratios")
            assert (again.status_code, again.json()["error"]["code"]) == (429, "overloaded")
        while program.is_busy:
            await asyncio.sleep(0.01)


async def test_without_a_simulator() -> None:
    async with console() as served:
        assert (await served.http.get("/console/snapshot")).json()["what_if"] is False
        asked = await served.http.post("/console/what-if", json={"prefill": 1, "decode": 1})
        assert asked.status_code == 404
        assert (await served.http.post("/console/ratios")).status_code == 404
