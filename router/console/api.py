"""The console's endpoints: its page, live snapshots, and what-if questions.

The page and its files contain no data and require no key; the data that they show requires one.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import asdict
from functools import cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from baton.config.cluster import Config
from baton.errors import DeadlineExceeded, NotFound
from baton.liveness.listening import listening
from baton.store.registry import WorkerRecord
from router.access.access import Access
from router.console.broadcaster import SnapshotBroadcaster
from router.console.collector import (
    SnapshotCollector,
    Supervision,
    no_supervision,
)
from router.console.ratio_grid import DEADLINE_S as GRID_DEADLINE_S
from router.console.ratio_grid import MAX_REQUESTS as GRID_REQUESTS
from router.console.ratio_grid import Check, Grid, advice_of, checks_of, grid_of, shapes_of
from router.console.sampler import YOUNG_S, RouterSampler
from router.console.what_if import (
    DEADLINE_S,
    TRAFFIC_S,
    Shape,
    ShapeAnswer,
    WhatIfProgram,
    WhatIfQuestion,
    WhatIfRequest,
    present_shape,
    question,
    rate_share,
)
from router.core.accounting import UNKNOWN_CLASS, RequestStats
from router.core.recent_requests import RecentRequest
from router.dispatch.dispatcher import ClusterDispatcher
from router.http.client import read_object
from router.http.fields import validate
from router.http.openapi import json_body
from router.http.sse import EventStream, encode_events, to_json

log = logging.getLogger(__name__)

SLOW_VIEWER_S = 5.0
"""Time after which a viewer that does not read its snapshots is disconnected, in seconds."""
_BODY_BYTES, _BODY_S = 4096, 5.0
_NVIDIA = Path("/dev/nvidiactl")
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    # Nothing from other sites, no inline code or style, no HTML made of strings.
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self';"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class ConsoleApi:
    """The console's endpoints. The HTTP gate checks the keys of requests, by the tables of
    ``router.access.access``."""

    def __init__(
        self,
        cluster: ClusterDispatcher,
        stats: RequestStats,
        config: Config,
        model: str,
        access: Access,
        what_if: WhatIfProgram | None = None,
        supervision: Supervision = no_supervision,
    ) -> None:
        """Create the endpoints; ``model`` is the served model's name. ``what_if`` None: what-if
        questions are not answered. ``supervision`` returns the supervisor's status."""
        self.sampler = RouterSampler(stats.metrics, cluster.workers.all)
        self._collector = SnapshotCollector(
            cluster,
            self.sampler,
            config,
            model,
            what_if=what_if is not None,
            supervision=supervision,
        )
        self._access = access
        self.broadcaster = SnapshotBroadcaster(self._collector.snapshot)
        self._cluster = cluster
        self._stats = stats
        self._config = config
        self._what_if = what_if

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""
        for path in ("/console", "/console/"):
            app.add_api_route(path, self.page, include_in_schema=False, response_model=None)
        add = partial(app.add_api_route, tags=["operations"], response_model=None)
        add("/console/snapshot", self.snapshot)
        events: dict[str, Any] = {"content": {EventStream.media_type: {}}}
        add("/console/events", self.events, response_class=Response, responses={200: events})
        add(
            "/console/ratios",
            self.ratios,
            methods=["POST"],
            response_class=Response,
            responses={200: events},
        )
        add(
            "/console/what-if",
            self.ask,
            methods=["POST"],
            openapi_extra=json_body(WhatIfRequest),
        )
        app.add_api_route(
            "/console/static/{name}", self.file, include_in_schema=False, response_model=None
        )

    def start(self) -> None:
        """Start to keep the console's history and its log of events."""
        self.broadcaster.start()

    async def close(self) -> None:
        """End the streams of all viewers, and close connections to workers."""
        await self.broadcaster.close()
        await self._collector.close()

    async def page(self, request: Request) -> Response:
        """Return the console's page."""
        return _file(request, "console.html")

    async def file(self, request: Request, name: str) -> Response:
        """Return one of the page's files."""
        return _file(request, name)

    async def snapshot(self, request: Request) -> Response:
        """Return one snapshot. Requires a key with scope metrics."""
        async with self.broadcaster.viewer():
            _, body = await self.broadcaster.after(0)
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    async def events(self, request: Request, history: bool = False) -> Response:
        """Stream a snapshot per second, as events. Requires a key with scope metrics.

        With ``history`` the first event is ``{"history": …}``: the figures of the last ten minutes.
        Events ``{"log": […]}`` bring what has happened in the cluster, at first all that is kept.
        """
        return EventStream(partial(self._stream, request.headers, history))

    async def _stream(
        self,
        headers: Mapping[str, str],
        history: bool,
        events: EventStream,
    ) -> None:
        log_end = 0
        async with self.broadcaster.viewer():
            version = 0
            while True:
                version, body = await self.broadcaster.after(version)
                # The key may have been revoked.
                self._access.check(headers, "metrics")
                told = [body]
                if history and (news := self._collector.events.since(log_end)):
                    told.append(to_json({"log": [asdict(one) for one in news]}))
                if history and not log_end:
                    told.insert(0, to_json({"history": self._collector.history.shown()}))
                log_end = self._collector.events.last
                try:
                    async with listening(SLOW_VIEWER_S):
                        await events.write(encode_events(told), more=True)
                except TimeoutError:
                    # The response stays incomplete, and the server closes the connection.
                    log.info("disconnected a console viewer that does not read")
                    return

    async def ask(self, request: Request) -> Response:
        """Simulate recent traffic with other numbers of workers.

        The body is a JSON object with the numbers of ``prefill`` and ``decode`` workers, and
        ``rate``, a multiple of the recent rate. Requires a key with scope admin.
        """
        body = await read_object(request, _BODY_BYTES, _BODY_S)
        asked = validate(WhatIfRequest, body)
        program, recent, workers = self._simulator(), self._recent(), self._workers()
        wanted = Shape(prefill=asked.prefill, decode=asked.decode)
        shapes = present_shape(workers), wanted
        answer = await program.ask(await self._question(shapes, recent, workers, rate=asked.rate))
        return Response(answer.model_dump_json(), media_type="application/json")

    async def ratios(self) -> Response:
        """Simulate recent traffic with up to two workers more or less of each role.

        Streams events: ``grid``, then ``cell`` for each simulated cluster, ``checks`` of the
        simulator against measured figures after the first, and ``advice``. The simulations end with
        the connection. Requires a key with scope admin.
        """
        program = self._simulator()
        recent, workers = self._recent()[-GRID_REQUESTS:], self._workers()
        share = await self._share()
        grid = grid_of(present_shape(workers), recent, self._config, share=share)
        question = await self._question(
            shapes_of(grid), recent, workers, deadline_s=GRID_DEADLINE_S
        )
        cells = program.shapes(question)
        return EventStream(partial(self._simulate, grid, recent, workers, cells))

    async def _simulate(
        self,
        grid: Grid,
        recent: Sequence[RecentRequest],
        workers: Sequence[WorkerRecord],
        simulated: AsyncGenerator[ShapeAnswer, None],
        events: EventStream,
    ) -> None:
        cells: list[ShapeAnswer] = []
        checks: tuple[Check, ...] = ()

        async def tell(**what: Any) -> None:
            async with listening(SLOW_VIEWER_S):
                await events.write(encode_events([to_json(what)]), more=True)

        try:
            async with aclosing(simulated):
                async for cell in simulated:
                    if not cells:
                        checks = checks_of(cell, recent)
                        await tell(grid=grid.model_dump())
                        await tell(checks=[one.model_dump() for one in checks])
                    cells.append(cell)
                    await tell(cell=cell.model_dump())
        except DeadlineExceeded:
            # The cells next to the present one are known.
            if not cells:
                raise
        advice = advice_of(grid, cells, checks, workers, self._config)
        await events.write(encode_events([to_json({"advice": advice.model_dump()})]), more=False)

    def _simulator(self) -> WhatIfProgram:
        if self._what_if is None:
            raise NotFound("this router was started without a simulator")
        return self._what_if

    def _recent(self) -> list[RecentRequest]:
        return self._stats.recent.since(time.monotonic() - TRAFFIC_S)

    def _workers(self) -> list[WorkerRecord]:
        links = self._cluster.workers
        return [link.record for link in links.all() if links.is_up(link)]

    async def _share(self) -> float:
        """Return this process's share of the requests of all processes on its port."""
        samples = await self.sampler.sample(YOUNG_S)
        # Requests refused before their class is known are not among the recent ones.
        ended = [
            value
            for key, value in samples.counts.items()
            if key[0] == "requests" and key[1] != UNKNOWN_CLASS
        ]
        return rate_share(self._stats.recent.ended, ended)

    async def _question(
        self,
        shapes: Sequence[Shape],
        recent: Sequence[RecentRequest],
        workers: Sequence[WorkerRecord],
        *,
        rate: float = 1.0,
        deadline_s: float = DEADLINE_S,
    ) -> WhatIfQuestion:
        return question(
            shapes,
            recent,
            workers,
            self._config,
            transfer_line=self._cluster.transfer_line,
            rate=rate,
            share=await self._share(),
            is_cpu=not await asyncio.to_thread(_NVIDIA.exists),
            deadline_s=deadline_s,
        )


@cache
def _contents() -> dict[str, tuple[bytes, str]]:
    """Return the bytes and the ETag of each file of the console's page, by name."""
    bodies = {
        one.name: one.read_bytes()
        for one in files(__package__).joinpath("static").iterdir()
        if Path(one.name).suffix in _KINDS
    }
    return {
        name: (body, f'"{hashlib.sha256(body).hexdigest()[:32]}"') for name, body in bodies.items()
    }


def _file(request: Request, name: str) -> Response:
    """Return a file of the console's page. Raises NotFound."""
    content = _contents().get(name)
    if content is None:
        raise NotFound(f"the console has no file {name!r}")
    body, tag = content
    headers = _HEADERS | {"etag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(body, media_type=_KINDS[Path(name).suffix], headers=headers)
