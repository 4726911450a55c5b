"""Reads a server's metrics of queues and batches repeatedly during a run.

Pages are stored and parsed later, since parsing would delay the measurement. Owned by the event
loop of the run.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from baton.security.tls import TlsFiles
from loadtest.generator.targets.http_connection import HttpPool, Origin
from loadtest.generator.targets.target import RunClock

EVERY_S = 1.0
_PAGE_S = 5.0
_PATHS = ("/metrics/cluster", "/metrics")
"""Paths of a server at which the reader looks for metrics, in this order: Baton's metrics of the
whole cluster, then the usual path of Prometheus metrics."""
_OK = 200
_SERIES: dict[str, tuple[str, ...]] = {
    "baton_sequences": ("role", "state"),
    "baton_waiting_requests": (),
    "baton_kv_blocks": ("role", "state"),
    "vllm:num_requests_running": (),
    "vllm:num_requests_waiting": (),
    "llamacpp:requests_processing": (),
    "llamacpp:requests_deferred": (),
}
"""Names of the metrics that a timeline keeps, each with the labels that it keeps. Values are summed
over all other labels."""
_KEPT = re.compile(rb"^(?:%s)[{ ].*$" % b"|".join(map(str.encode, _SERIES)), re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Timeline:
    """Values of metric series over time. A series has a name such as ``baton_sequences prefill
    running``, and one value for each time.
    """

    times_s: tuple[float, ...]
    series: dict[str, tuple[float, ...]]


class MetricsReader:
    """Reads a server's metrics page every ``EVERY_S`` seconds."""

    def __init__(self, url: str, clock: RunClock, tls: TlsFiles | None = None) -> None:
        """``url`` is the URL of the server, or of its metrics page."""
        origin = Origin.parse(url)
        self._origin = origin
        self._pool = HttpPool(origin, tls)
        self._clock = clock
        self._paths = [origin.path] if "/metrics" in origin.path else [*_PATHS]
        self._pages: list[tuple[float, bytes]] = []

    async def run(self) -> None:
        """Read the metrics page until cancelled. Return early if the server has no metrics page."""
        try:
            while self._paths:
                now = self._clock.now()
                page = await self._page(self._paths[0])
                if page is not None:
                    self._pages.append((now, b"\n".join(_KEPT.findall(page))))
                elif not self._pages:
                    del self._paths[0]
                    continue
                await asyncio.sleep(EVERY_S)
        finally:
            self._pool.close()

    def timeline(self) -> Timeline:
        """Parse the pages read so far, and return their series."""
        rows = [read_page(page.decode(errors="replace")) for _, page in self._pages]
        names = sorted({name for row in rows for name in row})
        return Timeline(
            tuple(now for now, _ in self._pages),
            {name: tuple(row.get(name, 0.0) for row in rows) for name in names},
        )

    async def _page(self, path: str) -> bytes | None:
        try:
            async with asyncio.timeout(_PAGE_S):
                page = _Page()
                connection = await self._pool.take()
                head = f"GET {path} HTTP/1.1\r\nhost: {self._origin.authority}\r\n\r\n"
                connection.send(head.encode(), page)
                return await page.whole
        except (TimeoutError, OSError):
            return None


class _Page:
    """Receives an HTTP answer, and sets the future ``whole`` to its body. The result is None if the
    request failed."""

    def __init__(self) -> None:
        self.whole: asyncio.Future[bytes | None] = asyncio.get_running_loop().create_future()
        self._status = 0
        self._parts: list[bytes] = []

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status = status

    def body(self, data: bytes, now: float) -> None:
        self._parts.append(data)

    def end(self, fault: str) -> None:
        if not self.whole.done():
            is_well = not fault and self._status == _OK
            self.whole.set_result(b"".join(self._parts) if is_well else None)


def read_page(page: str) -> dict[str, float]:
    """Parse a page in Prometheus' text format. Return the values of those series that a timeline
    keeps."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = _SERIES.get(sample.name)
            if labels is not None:
                name = " ".join((sample.name, *(sample.labels.get(label, "") for label in labels)))
                found[name] = found.get(name, 0.0) + sample.value
    return found
