"""Workers' /metrics pages: fetches them and parses the series that the console shows.

A page has hundreds of series, but only the lines of the shown ones are parsed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import httpx
from prometheus_client.parser import text_string_to_metric_families

from router.console.rates import Key
from router.http.metrics_pages import MetricsPages

DEADLINE_S = 0.8
"""Time limit for fetching a worker's page, in seconds. A page that takes longer is missing in the
snapshot."""
_FILL = "baton_batch_fill_ratio"
_IN_FLIGHT = "baton_transfer_in_flight_bytes"
_PAIRS = "baton_transfer_pairs"
_RECEIVED = "baton_received_bytes_total"
_HANDOFFS = "baton_handoffs_total"
_HANDOFF_SECONDS = "baton_handoff_seconds_bucket"
_SERIES = (_FILL, _IN_FLIGHT, _PAIRS, _RECEIVED, _HANDOFFS, _HANDOFF_SECONDS)


@dataclass(frozen=True, slots=True)
class WorkerPage:
    """The figures of one worker's page that the console uses."""

    batch_fill: float | None = None
    """Sequences in the worker's last step divided by their maximum; None: the page does not show
    it."""
    in_flight_bytes: int = 0
    """Bytes of KV that this worker is currently sending."""
    peers: Mapping[str, str] = field(default_factory=dict)
    """Transport by peer slot, for each connected pair."""
    counts: Mapping[Key, float] = field(default_factory=dict)
    """Counters by key: (``received``, peer, transport) in bytes, (``handoffs``, outcome), and
    (``handoff_seconds``, bound), the number of handoffs that took at most ``bound`` seconds."""


def read_page(text: str) -> WorkerPage:
    """Parse the text of a worker's /metrics page. Raises ValueError for an invalid page."""
    lines = [line for line in text.splitlines() if line.startswith(_SERIES)]
    fill: float | None = None
    in_flight = 0
    peers: dict[str, str] = {}
    counts: dict[Key, float] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for name, labels, value, *_ in family.samples:
            if name == _FILL:
                fill = value
            elif name == _IN_FLIGHT:
                in_flight = int(value)
            elif name == _PAIRS:
                peers[labels["peer"]] = labels["transport"]
            elif (key := _key(name, labels)) is not None:
                counts[key] = counts.get(key, 0.0) + value
    return WorkerPage(fill, in_flight, peers, counts)


def _key(name: str, labels: Mapping[str, str]) -> Key | None:
    """Return the key of a counter in ``WorkerPage.counts``; None if the console does not show
    it."""
    if name == _RECEIVED:
        return "received", labels["peer"], labels["transport"]
    if name == _HANDOFFS:
        return "handoffs", labels["outcome"]
    if name == _HANDOFF_SECONDS:
        return "handoff_seconds", labels["le"]
    return None


class WorkerPages:
    """Fetches the pages of many workers at once. Owned by one event loop."""

    def __init__(self, pages: MetricsPages) -> None:
        self._pages = pages
        self._client: httpx.AsyncClient | None = None

    async def read(self, addresses: Mapping[str, str]) -> dict[str, WorkerPage]:
        """Fetch the pages at ``addresses`` (values host:port). Return the pages of those that
        answer, by the keys of ``addresses``."""
        if self._client is None:
            self._client = self._pages.client(DEADLINE_S)
        client = self._client
        answers = await asyncio.gather(
            *(self._read(client, address) for address in addresses.values()),
            return_exceptions=True,
        )
        return dict(_pages(zip(addresses, answers, strict=True)))

    async def _read(self, client: httpx.AsyncClient, address: str) -> WorkerPage:
        return read_page(await self._pages.fetch(client, address, "worker", DEADLINE_S))

    async def close(self) -> None:
        """Close the connections to all pages; idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


def _pages(
    answers: Iterable[tuple[str, WorkerPage | BaseException]],
) -> Iterable[tuple[str, WorkerPage]]:
    for name, answer in answers:
        if isinstance(answer, WorkerPage):
            yield name, answer
        elif not isinstance(answer, Exception):
            raise answer
