"""The supervisor: keeps a worker in every slot, and publishes the status of each.

It has no essential state. Ray and the registry know which workers run. The wanted sizes are in its
settings, and in Redis after an operator has changed them. It may be killed and restarted at any
time, and takes over what it finds. Without it, workers and routers keep serving, and no worker is
replaced.

    finding the running workers ─found→ reconciling ─cancelled→ stopped
    any ─another supervisor has begun its term→ run() raises

While Redis does not answer, it is unknown whether another supervisor has begun its term. Until then
workers are started, and none is drained or ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping

import redis

from baton.errors import BatonError
from baton.host.background import end_tasks
from baton.store.supervision import PoolSizes, ScalingDecision
from baton.telemetry.metrics import SupervisorMetrics
from deploy.processes.leadership import SupervisorTerm
from deploy.supervisor.ray_slots import RaySlots, SlotObservation
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
"""Interval between two checks of the workers, in seconds."""
_PUBLISH_S = 2.0
"""Maximum interval between two publications of the status, in seconds. The status has a TTL, and is
also published when it changes."""
_FIND_AGAIN_S = 1.0
_SOON_S = 0.005

log = logging.getLogger(__name__)


class Supervisor:
    """Keeps a worker in every slot. Owned by one event loop."""

    def __init__(
        self,
        pools: Mapping[str, int],
        reconciler: Reconciler,
        slots: RaySlots,
        store: StatusStore,
        sizes: PoolSizes,
        term: SupervisorTerm,
        metrics: SupervisorMetrics,
        metrics_address: str,
        *,
        drain_s: float,
        note: Callable[[], str] = str,
        decisions: Callable[[], tuple[ScalingDecision, ...]] = tuple,
    ) -> None:
        """``pools`` has the configured number of workers of each pool.

        ``drain_s`` is how long an unwanted worker may take to finish its requests. ``note`` returns
        the autoscaler's text for the status, and ``decisions`` its latest decisions; both are empty
        without an autoscaler.
        """
        self._pools = pools
        self._reconciler = reconciler
        self._slots = slots
        self._store = store
        self._sizes = sizes
        self._term = term
        self._leads = False
        """Whether Redis has confirmed at the last look that no other supervisor leads."""
        self._metrics = metrics
        self._metrics_address = metrics_address
        self._drain_s = drain_s
        self._note = note
        self._decisions = decisions
        self._wanted = WantedSlots(pools)
        self._observed: dict[str, SlotObservation] = {}
        self._busy: dict[str, asyncio.Task[None]] = {}
        """The running action of each slot."""
        self._published: SupervisionStatus | None = None
        self._published_at = float("-inf")

    async def run(self) -> None:
        """Run the supervisor until cancelled. Raises BatonError when another supervisor leads."""
        try:
            await self._check_term()
            await self._find_running()
            while True:
                began = time.monotonic()
                await self._check_term()
                await self._read_sizes()
                await self._reconcile(began)
                await self._publish(began)
                await self._rest(began)
        finally:
            await end_tasks(self._busy.values())
            self._slots.close()

    async def _check_term(self) -> None:
        """Begin the term, or find out whether it is over."""
        self._leads = False
        try:
            if not self._term.epoch:
                await self._term.begin()
            elif not await self._goes_on():
                raise BatonError("another supervisor leads this cluster")
        except redis.RedisError as error:
            log.info("cannot tell whether another supervisor leads: %s", error)
        else:
            self._leads = True

    async def _goes_on(self) -> bool:
        highest = self._slots.highest_epoch
        if highest > self._term.epoch:
            return await self._term.rise_above(highest)
        return not await self._term.is_over()

    async def _rest(self, began: float) -> None:
        """Wait until the next check of the workers, which are checked every ``LOOK_S``. The wait
        ends early after a death, or when a start is due."""
        now = time.monotonic()
        waits = (
            state.wait_s for state in self._reconciler.states(now).values() if state.wait_s > 0
        )
        rest_s = max(0.0, began + LOOK_S - now)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min((rest_s, *(wait_s + _SOON_S for wait_s in waits)))):
                await self._slots.death()

    async def _find_running(self) -> None:
        while True:
            try:
                await self._slots.find_running()
                break
            except Exception as error:
                # Without Ray's control store workers can be neither found nor started.
                log.warning("cannot find the workers yet: %s", error)
                await asyncio.sleep(_FIND_AGAIN_S)
        self._wanted = WantedSlots(self._pools, self._slots.names)
        try:
            known = await self._store.read()
        except redis.RedisError:
            known = None
        for slot, status in known.slots.items() if known is not None else ():
            if split(slot)[0] not in self._pools:
                continue
            state = status.state
            self._reconciler.remember(slot, state.deaths, state.last_error)
            # A worker that ran and is gone has died with the last supervisor, or after it.
            if status.pid and state.phase is Phase.RUNNING and slot not in self._slots.names:
                await self._slots.find_missed(slot, status.pid)
                self._reconciler.started(slot)

    async def _read_sizes(self) -> None:
        """Read the wanted size of each pool. Sizes that Redis has lost are written again."""
        try:
            for pool, count in self._wanted.choose(await self._sizes.read()).items():
                await self._sizes.restore(pool, count)
        except redis.RedisError as error:
            log.info("cannot read the pools' sizes: %s", error)
        self._reconciler.want(self._wanted.slots())

    async def _reconcile(self, now: float) -> None:
        """Observe each slot, decide on actions, and start them."""
        await self._slots.refresh()
        known = self._reconciler.states(now).keys() | self._slots.names
        for slot in sorted(slot for slot in known if split(slot)[0] in self._pools):
            seen = await self._slots.observe(slot)
            before = self._observed.get(slot)
            self._observed[slot] = seen
            cause = self._reconciler.observe(
                slot,
                seen.observed,
                now,
                seen.error,
                cause=seen.cause,
                outdated=seen.outdated,
                progress=seen.progress,
            )
            if cause is None:
                if before is not None and before.observed is not seen.observed:
                    log.info("%s: %s %s", slot, seen.observed, seen.error)
            else:
                why = self._reconciler.states(now)[slot].last_error
                log.warning("%s has died (%s): %s", slot, cause, why)
                self._metrics.deaths.labels(worker=slot, cause=cause.value).inc()
        for slot, action in self._reconciler.decide(now).items():
            if slot not in self._busy:
                log.info("%s: %s", slot, action)
                task = asyncio.create_task(self._carry_out(slot, action))
                self._busy[slot] = task
                task.add_done_callback(lambda _, slot=slot: self._busy.pop(slot))  # type: ignore[misc]

    async def _carry_out(self, slot: str, action: SlotAction) -> None:
        try:
            await self._act(slot, action)
        except Exception as error:
            log.warning("%s: %r", slot, error)
            told = error.message if isinstance(error, BatonError) else f"Ray: {error}"
            self._reconciler.failed(slot, told.splitlines()[0])

    async def _act(self, slot: str, action: SlotAction) -> None:
        if action is SlotAction.START:
            await self._slots.start(slot)
            # The worker may be dead before the next look.
            self._reconciler.started(slot)
        elif not self._leads:
            raise BatonError("Redis does not answer, so another supervisor may lead")
        elif action is SlotAction.DRAIN:
            await self._slots.drain(slot, self._drain_s)
        else:
            await self._slots.end(slot)

    async def _publish(self, now: float) -> None:
        states = self._reconciler.states(now)
        self._show(states)
        slots = {slot: self._status(slot, state) for slot, state in states.items()}
        status = SupervisionStatus(
            os.getpid(), self._metrics_address, slots, self._note(), self._decisions()
        )
        if status == self._published and now - self._published_at < _PUBLISH_S:
            return
        try:
            await self._store.write(status)
        except redis.RedisError as error:
            log.info("cannot publish the status: %s", error)
        else:
            self._published, self._published_at = status, now

    def _show(self, states: Mapping[str, SlotState]) -> None:
        """Update the supervisor's metrics from the states of the slots."""
        for slot, state in states.items():
            for phase in Phase:
                self._metrics.slots.labels(slot, split(slot)[0], phase.value).set(
                    phase is state.phase
                )
        for slot in self._observed.keys() - states.keys():
            del self._observed[slot]
            for phase in Phase:
                # A slot that came and went within one look was never shown.
                with contextlib.suppress(KeyError):
                    self._metrics.slots.remove(slot, split(slot)[0], phase.value)

    def _status(self, slot: str, state: SlotState) -> SlotStatus:
        seen = self._observed[slot]
        # The wait is rounded to seconds: otherwise every look would change the status.
        shown = SlotState(state.phase, state.deaths, state.last_error, float(round(state.wait_s)))
        return SlotStatus(shown, seen.pid, seen.node)
