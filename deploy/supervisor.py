"""The supervisor: keeps a worker in every slot, and says how each is doing.

It holds no truth of its own. Who lives is known to Ray and to the registry, what is wanted stands
in its settings; it may be killed at any time and started again, and takes over what it finds. While
it is away workers and routers serve on, and nobody is replaced.

    recalling ─the living are found→ keeping ─stop()→ stopped
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

import redis

from baton.background import end_tasks
from baton.metrics import SupervisorMetrics
from deploy.fleet import Seen
from deploy.pool_keeper import Order, Phase, PoolKeeper, SlotState
from deploy.slot_board import SlotBoard, SlotNews, Supervision

LOOK_S = 0.5
"""How often it looks at the workers."""
_TELL_S = 2.0
"""The news is told when it changes, and as often as this, since what is told has a TTL."""
_RECALL_AGAIN_S = 1.0

log = logging.getLogger(__name__)


class Workers(Protocol):
    """What it looks after; ``deploy.fleet.Fleet`` with Ray behind it."""

    async def recall(self) -> None: ...

    async def look(self, slot: str) -> Seen: ...

    async def start(self, slot: str) -> None: ...

    async def end(self, slot: str) -> None: ...

    def close(self) -> None: ...


class Supervisor:
    """Owned by one event loop."""

    def __init__(
        self,
        pools: Mapping[str, str],
        workers: Workers,
        board: SlotBoard,
        metrics: SupervisorMetrics,
        metrics_address: str,
    ) -> None:
        """``pools``: the pool of each slot in which a worker is to be."""
        self._pools = pools
        self._workers = workers
        self._board = board
        self._metrics = metrics
        self._metrics_address = metrics_address
        self._keeper = PoolKeeper()
        self._seen: dict[str, Seen] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        """The order that is being carried out for a slot."""
        self._told: Supervision | None = None
        self._told_at = float("-inf")

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            await self._recall()
            while True:
                began = time.monotonic()
                await self._look(began)
                await self._tell(began)
                await asyncio.sleep(max(0.0, began + LOOK_S - time.monotonic()))
        finally:
            await end_tasks(self._busy.values())
            self._workers.close()

    async def _recall(self) -> None:
        self._keeper.want(self._pools.keys())
        while True:
            try:
                await self._workers.recall()
                break
            except Exception as error:
                # Without Ray's control store nobody can be found, nor started.
                log.warning("the workers cannot be found yet: %s", error)
                await asyncio.sleep(_RECALL_AGAIN_S)
        try:
            known = await self._board.read()
        except redis.RedisError:
            known = None
        for slot, news in known.slots.items() if known is not None else ():
            if slot in self._pools:
                self._keeper.remember(slot, news.state.deaths, news.state.last_error)

    async def _look(self, now: float) -> None:
        for slot in self._pools:
            seen = await self._workers.look(slot)
            known = self._seen.get(slot)
            if known is not None and known.sight is not seen.sight:
                log.info("%s: %s %s", slot, seen.sight, seen.error)
            self._seen[slot] = seen
            if self._keeper.see(slot, seen.sight, now, seen.error):
                self._metrics.deaths.labels(worker=slot).inc()
        for slot, order in self._keeper.decide(now).items():
            if slot not in self._busy:
                log.info("%s: %s", slot, order)
                act = self._workers.start if order is Order.START else self._workers.end
                task = asyncio.create_task(self._carry_out(slot, order, act(slot)))
                self._busy[slot] = task
                task.add_done_callback(lambda _, slot=slot: self._busy.pop(slot))  # type: ignore[misc]

    async def _carry_out(self, slot: str, order: Order, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            log.warning("%s: %r", slot, error)
            self._keeper.could_not(slot, f"Ray: {error}".splitlines()[0])
        else:
            if order is Order.START:
                # It may be dead before anybody looks.
                self._keeper.started(slot)

    async def _tell(self, now: float) -> None:
        states = self._keeper.states(now)
        news = {slot: self._news(slot, state) for slot, state in states.items()}
        for slot, state in states.items():
            for phase in Phase:
                labels = {"worker": slot, "pool": self._pools[slot], "state": phase.value}
                self._metrics.slots.labels(**labels).set(phase is state.phase)
        told = Supervision(os.getpid(), self._metrics_address, news)
        if told == self._told and now - self._told_at < _TELL_S:
            return
        try:
            await self._board.write(told)
        except redis.RedisError as error:
            log.info("the news cannot be told: %s", error)
        else:
            self._told, self._told_at = told, now

    def _news(self, slot: str, state: SlotState) -> SlotNews:
        seen = self._seen[slot]
        # To the second: it would be news at every look else.
        shown = SlotState(state.phase, state.deaths, state.last_error, float(round(state.wait_s)))
        return SlotNews(shown, seen.pid, seen.host)
