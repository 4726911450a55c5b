"""The autoscaler at work: looks, asks ``baton.autoscaling.autoscaler``, and carries out what that
says.

    looking ─nothing to do→ looking
    looking ─decided→ acting ─done, failed, or its deadline→ looking

One decision at a time. Roles are changed as by `baton role`, sizes as by `baton scale`: they are
written down where an operator's are, and the supervisor acts on them. Owned by the supervisor's
event loop; it keeps nothing that another one would miss.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

import redis

from baton.autoscaling.autoscaler import Action, Autoscaler, Bounds, ChangeRole, Resize
from baton.autoscaling.cluster_figures import ROLES
from baton.config.cluster import Config, Role
from baton.errors import BatonError, Unavailable
from baton.store.registry import WorkerRecord
from baton.store.supervision import PoolSizes
from baton.telemetry.metrics import SupervisorMetrics
from deploy.supervisor.cluster_look import ClusterLook, Phases
from deploy.supervisor.pool_keeper import Phase
from deploy.supervisor.role_change import change_role
from deploy.supervisor.wanted_slots import split

NOTICE_S = 10.0
"""Within which the supervisor acts on a size that was written down."""
_POLL_S = 0.1

ChangeOneRole = Callable[[WorkerRecord, Role, float], Awaitable[float]]

log = logging.getLogger(__name__)


class Autoscaling:
    """See the module's text."""

    def __init__(
        self,
        config: Config,
        look: ClusterLook,
        phases: Phases,
        sizes: PoolSizes,
        metrics: SupervisorMetrics,
        change: ChangeOneRole = change_role,
    ) -> None:
        """``change`` has a worker play a role within some seconds, and raises BatonError."""
        self._settings = config.autoscaler
        self._drain_s = config.drain_deadline_s
        self._look = look
        self._phases = phases
        self._sizes = sizes
        self._metrics = metrics
        self._change = change
        self._mode = "dry_run" if self._settings.dry_run else "live"
        bounds = Bounds.of(self._settings, sum(pool.count for pool in config.pools))
        pools = {pool.role: pool.name for pool in config.pools}
        self._autoscaler = Autoscaler(self._settings, bounds, pools)
        self._last = ""

    async def run(self) -> None:
        """Until it is cancelled."""
        log.info("the autoscaler looks every %g s (%s)", self._settings.interval_s, self._mode)
        while True:
            began = time.monotonic()
            try:
                await self._once(began)
            except (redis.RedisError, OSError) as error:
                log.info("the autoscaler sees nothing: %s", error)
            except Exception:
                # Without it workers are still kept; a supervisor that ends over it would not.
                log.exception("the autoscaler's look has failed")
            await asyncio.sleep(max(0.0, began + self._settings.interval_s - time.monotonic()))

    def note(self) -> str:
        """For `baton status`: what it sees, and what it did last."""
        said = f"{self._autoscaler.summary}{self._last}"
        return f"dry run: {said}" if self._settings.dry_run else said

    async def _once(self, now: float) -> None:
        seen = await self._look.look(now)
        actions = self._autoscaler.decide(seen, now)
        for role in ROLES:
            self._metrics.autoscaler_needed_workers.labels(role).set(self._autoscaler.needs[role])
        for action in actions:
            self._tell(action)
        if actions and not self._settings.dry_run:
            await asyncio.gather(*(self._carry_out(action) for action in actions))
        if actions:
            self._autoscaler.acted(time.monotonic())
        await self._look.forget_gone(now)

    def _tell(self, action: Action) -> None:
        text = f"{words(action)} ({action.reason.value}: {action.why})"
        log.info("%s%s", "would: " if self._settings.dry_run else "", text)
        self._last = f"; last: {words(action)} at {time.strftime('%H:%M:%S')}"
        self._metrics.autoscaler_decisions.labels(
            action.name, action.reason.value, self._mode
        ).inc()

    async def _carry_out(self, action: Action) -> None:
        try:
            if isinstance(action, ChangeRole):
                record = self._look.records[action.slot]
                took_s = await self._change(record, action.role, self._drain_s)
                log.info("%s: it took %.1f s", words(action), took_s)
            else:
                await self._resize(action)
        except (BatonError, redis.RedisError, OSError) as error:
            log.warning("%s: %s", words(action), error)
            self._metrics.autoscaler_failures.labels(action.name).inc()

    async def _resize(self, action: Resize) -> None:
        """Write the size down, unless somebody else has just done so; wait until it is seen."""
        count = self._count(action.pool)
        if (await self._sizes.read()).get(action.pool, count) != count:
            raise Unavailable(f"somebody has just given {action.pool} another size")
        await self._sizes.write(action.pool, count + action.by)
        deadline = time.monotonic() + NOTICE_S
        # The supervisor looks every half second; the next decision is not to precede it.
        while self._count(action.pool) == count:
            if time.monotonic() > deadline:
                raise Unavailable("the supervisor has not acted on it yet")
            await asyncio.sleep(_POLL_S)

    def _count(self, pool: str) -> int:
        """Workers that are wanted in it."""
        return sum(
            split(slot)[0] == pool and phase is not Phase.LEAVING
            for slot, phase in self._phases().items()
        )


def words(action: Action) -> str:
    """What is done, for people."""
    if isinstance(action, ChangeRole):
        return f"{action.slot} becomes a {action.role} worker"
    return f"{action.pool} {'gets' if action.by > 0 else 'loses'} a worker"
