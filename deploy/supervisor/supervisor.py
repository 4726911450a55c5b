"""The supervisor: keeps a worker in every slot, and says how each is doing.

It holds no truth of its own. Who lives is known to Ray and to the registry; what is wanted stands
in its settings, and in Redis once an operator has changed it. It may be killed at any time and
started again, and takes over what it finds. While it is away workers and routers serve on, and
nobody is replaced.

    recalling ─the living are found→ keeping ─stop()→ stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from typing import Protocol

import redis

from baton.host.background import end_tasks
from baton.store.supervision import PoolSizes
from baton.telemetry.metrics import SupervisorMetrics
from deploy.supervisor.ray_slots import SlotObservation
from deploy.supervisor.reconciler import (
    Phase,
    Reconciler,
    SlotAction,
    SlotState,
    WantedSlots,
    split,
)
from deploy.supervisor.status_store import SlotStatus, StatusStore, SupervisionStatus

LOOK_S = 0.5
"""How often it looks at the workers."""
_TELL_S = 2.0
"""The news is told when it changes, and as often as this, since what is told has a TTL."""
_RECALL_AGAIN_S = 1.0
_SOON_S = 0.005

log = logging.getLogger(__name__)


class Workers(Protocol):
    """What it looks after; ``deploy.supervisor.ray_slots.RaySlots`` with Ray behind it."""

    @property
    def slots(self) -> Collection[str]: ...

    async def death(self) -> None:
        """Wait until one is heard of that nobody has looked at yet."""

    async def recall(self) -> None: ...

    async def refresh(self) -> None: ...

    async def look(self, slot: str) -> SlotObservation: ...

    async def start(self, slot: str) -> None: ...

    async def drain(self, slot: str, deadline_s: float) -> None: ...

    async def end(self, slot: str) -> None: ...

    def close(self) -> None: ...


class Supervisor:
    """Owned by one event loop."""

    def __init__(
        self,
        pools: Mapping[str, int],
        workers: Workers,
        board: StatusStore,
        sizes: PoolSizes,
        metrics: SupervisorMetrics,
        metrics_address: str,
        *,
        drain_s: float,
    ) -> None:
        """``pools``: how many workers each has by the configuration. ``drain_s``: how long one that

        is not wanted any more may take to end what it runs.
        """
        self._pools = pools
        self._workers = workers
        self._board = board
        self._sizes = sizes
        self._metrics = metrics
        self._metrics_address = metrics_address
        self._drain_s = drain_s
        self._reconciler = Reconciler(drain_s)
        self._wanted = WantedSlots(pools)
        self._seen: dict[str, SlotObservation] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        """The order that is being carried out for a slot."""
        self.note: Callable[[], str] = str
        """What the autoscaler says of itself; nothing where there is none."""
        self._told: SupervisionStatus | None = None
        self._told_at = float("-inf")

    def phases(self) -> Mapping[str, Phase]:
        """The state of each slot, now."""
        states = self._reconciler.states(time.monotonic())
        return {slot: state.phase for slot, state in states.items()}

    async def run(self) -> None:
        """Until it is cancelled."""
        try:
            await self._recall()
            while True:
                began = time.monotonic()
                await self._want()
                await self._look(began)
                await self._tell(began)
                await self._rest(began)
        finally:
            await end_tasks(self._busy.values())
            self._workers.close()

    async def _rest(self, began: float) -> None:
        """Until the next look: sooner where somebody has died, or is to be started by then."""
        now = time.monotonic()
        waits = (
            state.wait_s for state in self._reconciler.states(now).values() if state.wait_s > 0
        )
        rest_s = max(0.0, began + LOOK_S - now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min((rest_s, *(wait_s + _SOON_S for wait_s in waits)))):
                await self._workers.death()

    async def _recall(self) -> None:
        while True:
            try:
                await self._workers.recall()
                break
            except Exception as error:
                # Without Ray's control store nobody can be found, nor started.
                log.warning("the workers cannot be found yet: %s", error)
                await asyncio.sleep(_RECALL_AGAIN_S)
        self._wanted = WantedSlots(self._pools, self._workers.slots)
        try:
            known = await self._board.read()
        except redis.RedisError:
            known = None
        for slot, news in known.slots.items() if known is not None else ():
            if split(slot)[0] in self._pools:
                self._reconciler.remember(slot, news.state.deaths, news.state.last_error)

    async def _want(self) -> None:
        """Learn how many workers each pool is to have; what is lost in Redis is written again."""
        try:
            for pool, count in self._wanted.choose(await self._sizes.read()).items():
                await self._sizes.restore(pool, count)
        except redis.RedisError as error:
            log.info("the pools' sizes cannot be read: %s", error)
        self._reconciler.want(self._wanted.slots())

    async def _look(self, now: float) -> None:
        await self._workers.refresh()
        known = self._reconciler.states(now).keys() | self._workers.slots
        for slot in sorted(slot for slot in known if split(slot)[0] in self._pools):
            seen = await self._workers.look(slot)
            before = self._seen.get(slot)
            if before is not None and before.observed is not seen.observed:
                log.info("%s: %s %s", slot, seen.observed, seen.error)
            self._seen[slot] = seen
            if self._reconciler.observe(slot, seen.observed, now, seen.error):
                self._metrics.deaths.labels(worker=slot).inc()
        for slot, order in self._reconciler.decide(now).items():
            if slot not in self._busy:
                log.info("%s: %s", slot, order)
                task = asyncio.create_task(self._carry_out(slot, order))
                self._busy[slot] = task
                task.add_done_callback(lambda _, slot=slot: self._busy.pop(slot))  # type: ignore[misc]

    async def _carry_out(self, slot: str, order: SlotAction) -> None:
        try:
            await self._act(slot, order)
        except Exception as error:
            log.warning("%s: %r", slot, error)
            self._reconciler.failed(slot, f"Ray: {error}".splitlines()[0])

    async def _act(self, slot: str, order: SlotAction) -> None:
        if order is SlotAction.START:
            await self._workers.start(slot)
            # It may be dead before anybody looks.
            self._reconciler.started(slot)
        elif order is SlotAction.DRAIN:
            await self._workers.drain(slot, self._drain_s)
        else:
            await self._workers.end(slot)

    async def _tell(self, now: float) -> None:
        states = self._reconciler.states(now)
        self._show(states)
        news = {slot: self._news(slot, state) for slot, state in states.items()}
        told = SupervisionStatus(os.getpid(), self._metrics_address, news, self.note())
        if told == self._told and now - self._told_at < _TELL_S:
            return
        try:
            await self._board.write(told)
        except redis.RedisError as error:
            log.info("the news cannot be told: %s", error)
        else:
            self._told, self._told_at = told, now

    def _show(self, states: Mapping[str, SlotState]) -> None:
        for slot, state in states.items():
            for phase in Phase:
                self._metrics.slots.labels(slot, split(slot)[0], phase.value).set(
                    phase is state.phase
                )
        for slot in self._seen.keys() - states.keys():
            del self._seen[slot]
            for phase in Phase:
                # One that was seen and went in the same look was never shown.
                with contextlib.suppress(KeyError):
                    self._metrics.slots.remove(slot, split(slot)[0], phase.value)

    def _news(self, slot: str, state: SlotState) -> SlotStatus:
        seen = self._seen[slot]
        # To the second: it would be news at every look else.
        shown = SlotState(state.phase, state.deaths, state.last_error, float(round(state.wait_s)))
        return SlotStatus(shown, seen.pid, seen.node)
