"""Sends requests when they are due, and collects their results.

Owned by one event loop. In an open loop requests are sent on schedule, independent of earlier ones.
In a closed loop a fixed number is in flight, and the next request follows when one has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from loadtest.generator.results.request_record import Outcome, RequestRecord
from loadtest.generator.targets.target import RunClock, Target
from loadtest.generator.workload.prompts import PlannedRequest
from loadtest.generator.workload.traffic import Source

P = TypeVar("P")

_AHEAD = 128
"""Maximum number of requests that are encoded ahead of the time at which they are sent."""
_PROBE_S = 0.02


@dataclass(slots=True)
class LiveCounts:
    """Counts of a running load. The load's driver writes them; other objects only read them."""

    planned: int | None = None
    """Number of requests that the run sends; None if the run ends after a given time."""
    sent: int = 0
    ended: int = 0
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    output_tokens: int = 0
    late_s: float = 0.0
    """Delay of the request that was sent last, in seconds: from its scheduled time to its actual
    send."""

    @property
    def under_way(self) -> int:
        """Return the number of requests in flight."""
        return self.sent - self.ended


class LoadDriver(Generic[P]):
    """Sends the requests of one run of a load to one target."""

    def __init__(self, target: Target[P]) -> None:
        self.clock = RunClock()
        self.counts = LiveCounts()
        self.loop_lag_s: list[float] = []
        """Samples of the event-loop lag of this process, in seconds. The times of requests may be
        wrong by as much."""
        self.stopped_s: float | None = None
        """Time of the call of ``stop``, in seconds since the run's beginning."""
        self._asleep: asyncio.Future[None] | None = None
        self._target = target
        self._records: list[RequestRecord] = []

    def stop(self) -> None:
        """Send no more requests. Requests in flight may still end."""
        self.stopped_s = self.clock.now()
        _wake(self._asleep)

    async def open_loop(self, requests: Iterator[PlannedRequest]) -> list[RequestRecord]:
        """Send each request when it is due. Return the records when all requests have ended."""
        ready: asyncio.Queue[tuple[PlannedRequest, P] | None] = asyncio.Queue(_AHEAD)
        for request in itertools.islice(requests, _AHEAD):
            ready.put_nowait((request, self._target.prepare(request)))
        async with self._watching(), asyncio.TaskGroup() as group:
            preparing = group.create_task(self._prepare(requests, ready), name="prepare")
            self.clock.start()
            while (item := await ready.get()) is not None:
                request, prepared = item
                await self._sleep(request.due_s - self.clock.now())
                if self.stopped_s is not None:
                    preparing.cancel()
                    break
                self._sent(request.due_s)
                group.create_task(self._ask(request, prepared, request.due_s))
        return self._records

    async def closed_loop(
        self, source: Source, concurrency: int, seconds: float, max_requests: int | None
    ) -> list[RequestRecord]:
        """Keep ``concurrency`` requests in flight, until ``seconds`` have passed or
        ``max_requests`` are sent.

        A request is due when it is sent: in a closed loop the server sets the pace, and requests
        that would have arrived during a stall are never sent. Use an open loop for comparisons.
        """
        numbers = iter(range(max_requests)) if max_requests is not None else itertools.count()
        async with self._watching(), asyncio.TaskGroup() as group:
            self.clock.start()
            for _ in range(concurrency):
                group.create_task(self._one_after_another(source, numbers, seconds))
        return self._records

    async def _one_after_another(
        self, source: Source, numbers: Iterator[int], seconds: float
    ) -> None:
        while self.clock.now() < seconds and self.stopped_s is None:
            number = next(numbers, None)
            if number is None:
                return
            request = source.request(number, 0.0)
            prepared = self._target.prepare(request)
            due_s = self.clock.now()
            self._sent(due_s)
            await self._ask(request, prepared, due_s)

    async def _prepare(
        self,
        requests: Iterator[PlannedRequest],
        ready: asyncio.Queue[tuple[PlannedRequest, P] | None],
    ) -> None:
        for request in requests:
            await ready.put((request, self._target.prepare(request)))
            # After each request, let sends that are due, and answers, run first.
            await asyncio.sleep(0)
        await ready.put(None)

    async def _sleep(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until ``stop`` is called."""
        if seconds <= 0 or self.stopped_s is not None:
            return
        loop = asyncio.get_running_loop()
        self._asleep = loop.create_future()
        timer = loop.call_later(seconds, _wake, self._asleep)
        try:
            await self._asleep
        finally:
            timer.cancel()

    def _sent(self, due_s: float) -> None:
        self.counts.sent += 1
        self.counts.late_s = self.clock.now() - due_s

    async def _ask(self, request: PlannedRequest, prepared: P, due_s: float) -> None:
        record = await self._target.ask(request, prepared, due_s, self.clock)
        self._records.append(record)
        self.counts.ended += 1
        self.counts.outcomes[record.outcome] += 1
        self.counts.output_tokens += record.output_tokens

    @contextlib.asynccontextmanager
    async def _watching(self) -> AsyncIterator[None]:
        """Measure the event loop's lag during the block, and exclude existing objects from garbage
        collection.
        """
        gc.collect()
        gc.freeze()
        probe = asyncio.create_task(self._probe(), name="lag probe")
        try:
            yield
        finally:
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
            gc.unfreeze()

    async def _probe(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            self.loop_lag_s.append(max(0.0, loop.time() - due))


def _wake(sleeper: asyncio.Future[None] | None) -> None:
    if sleeper is not None and not sleeper.done():
        sleeper.set_result(None)
