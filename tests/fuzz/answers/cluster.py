"""The cluster of a round: real workers of one or two models, and one or two routers.

    worker: starting → serving ─drained, or ended by a fault→ gone

Owned by one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from baton.autoscaling.traffic import TrafficCounts
from baton.config.choices import Role
from baton.store.pin_store import PinStore
from baton.telemetry.metrics import RouterMetrics
from engine.engine import EngineSettings
from router.dispatch.dispatcher import ClusterDispatcher
from tests.fuzz.answers.comparison import Reference
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.models import make_tiny_model
from worker.process import WorkerProcess

ROLES: tuple[Role, ...] = ("prefill", "decode")
COUNT = 2
"""Workers of each role."""
MODELS = ("first", "second")
EXACT: Mapping[str, Any] = {"dtype": "bfloat16", "deterministic": True}
"""With these, equal means equal bit for bit."""
IDLE_S = 20.0
"""Seconds after which a worker that still holds something has leaked it."""
_LOOK_S = 0.02
_TIMES: Mapping[str, Any] = {
    "lease_s": 3.0,
    "heartbeat_s": 0.3,
    "hang_s": 6.0,
    "registry_ttl_s": 4.0,
}


def make_models(folder: Path) -> dict[str, Path]:
    """Make the models of ``MODELS``. They have one shape and one tokenizer, and other weights.

    Their KV blocks are so large that a pool of 1 MiB has 64 of them: as many as two sequences."""
    return {
        name: make_tiny_model(folder / name, layers=8, head_dim=16, seed=seed)
        for seed, name in enumerate(MODELS)
    }


def references(models: Mapping[str, Path]) -> dict[str, Reference]:
    """Return an engine for each model, by its fingerprint."""
    found = [
        Reference(
            folder,
            EngineSettings(folder, **EXACT, device="cpu", kv_pool_bytes=8 << 20, threads=1),
        )
        for folder in models.values()
    ]
    return {one.engine.fingerprint: one for one in found}


def shape_of(source: random.Random) -> dict[str, Any]:
    """Draw what a round's cluster is made of."""
    return {
        "prefill_pool": {"kv_pool_mib": source.choice((1, 2, 8))},
        "decode_pool": {"kv_pool_mib": source.choice((1, 1, 2, 8))},
        "max_sequences": source.choice((4, 12)),
        "chunk_tokens": source.choice((64, 128, 256)),
        "local_prefill": source.choice(("auto", "auto", "never", "always")),
        "drafter": source.choice(("none", "ngram")),
        "kv_host_mib": source.choice((0, 2)),
        "policy": source.choice(("predictive", "least_loaded", "round_robin", "prefix")),
        "transport": source.choice(("auto", "auto", "grpc")),
    }


class FuzzedCluster:
    """A ``MiniCluster``, what its workers serve, and what has happened to it."""

    def __init__(self, mini: MiniCluster, models: Mapping[str, Path]) -> None:
        self.mini = mini
        self.models = models
        self.model = MODELS[0]
        """The model that new workers serve."""
        self.routers: list[ClusterDispatcher] = [mini.dispatcher]
        self.busy: set[str] = set()
        """Slots of workers that a fault has to itself."""
        self.events: list[tuple[float, str]] = []
        """What was done to the cluster, and when: seconds of the round."""
        self.leaks: list[str] = []
        """What workers that were drained have left in use."""
        self.excuses: list[float] = []
        """When answers may have lost the last worker of their model: seconds of the round."""
        self.losses: list[float] = []
        """When requests have lost a worker. If that happens twice, no worker may be left."""
        self._began = time.monotonic()
        self._models: dict[str, str] = {}
        self._number = COUNT
        for slot in mini.workers:
            self._models[slot] = self.model

    @property
    def now(self) -> float:
        """Seconds since the round began."""
        return time.monotonic() - self._began

    def log(self, event: str) -> None:
        """Add to ``events``."""
        self.events.append((self.now, event))

    # Workers

    def excuse(self) -> None:
        """Note that a worker is lost to its requests. It may be the last one of its model."""
        self.losses.append(self.now)
        if len({self._models[slot] for slot in self.mini.workers}) > 1:
            self.excuses.append(self.now)

    def free(self, role: Role | None = None) -> list[str]:
        """Return the slots that a fault may strike, of the pool of ``role`` or of both."""
        slots = sorted(self.mini.workers)
        return [one for one in slots if one not in self.busy and (role or "") in one]

    async def start(self, role: Role, slot: str = "", model: str = "") -> str:
        """Start a worker of the current model, or ``model``. Return its slot, by default a new
        one."""
        if not slot:
            slot = f"{role}-{self._number}"
            self._number += 1
        model = model or self.model
        pool = next(one for one in self.mini.config.pools if one.name == role)
        self.mini.model = self.models[model]
        starting = self.mini.start_worker(pool, slot)
        await starting
        self._models[slot] = model
        return slot

    async def kill(self, slot: str) -> None:
        """End a worker and all that it runs, and start it again with its model."""
        self.log(f"kill {slot}")
        self.excuse()
        role = self._role(slot)
        await self.mini.workers.pop(slot).stop()
        await self.start(role, slot, self._models[slot])
        self.log(f"{slot} is back")

    async def retire(self, slot: str, deadline_s: float) -> None:
        """Drain a worker until it has ended."""
        self.log(f"drain {slot} within {deadline_s:.1f} s")
        worker = self.mini.workers[slot]
        await worker.drain(deadline_s)
        await worker.ended()
        del self.mini.workers[slot]
        self.leaks += _held(slot, worker)
        self.log(f"{slot} has left")

    async def replace(self, slot: str, deadline_s: float, *, patient: bool = False) -> None:
        """Start another worker of the role and the current model, and drain the one at ``slot``.

        ``patient``: only once no other worker of the role is struck, as rollouts do."""
        fresh = await self.start(self._role(slot))
        self.log(f"{fresh} serves the {self.model} model")
        role = self._role(slot)
        while patient and any(one != slot and role in one for one in self.busy):
            await asyncio.sleep(_LOOK_S)
        await self.retire(slot, deadline_s)

    def _role(self, slot: str) -> Role:
        return "prefill" if slot.startswith("prefill") else "decode"

    # Routers

    async def add_router(self) -> ClusterDispatcher:
        """Start one more router, which gets its share of the requests once it is ready."""
        mini = self.mini
        router = ClusterDispatcher(
            mini.config,
            mini.tokenizer,
            RouterMetrics(CollectorRegistry()),
            TrafficCounts(),
            mini.registry,
            mini.index,
            pins=PinStore(mini.redis, mini.cluster_id),
        )
        await router.start()
        await router.settled()
        self.routers.append(router)
        return router

    # The end

    async def left_over(self) -> list[str]:
        """Wait until nothing runs. Return what workers hold without a use, a line each, and why
        workers have ended by themselves."""
        workers = self.mini.workers
        with contextlib.suppress(TimeoutError):
            await self.mini.until(
                lambda: not any(_held(slot, one) for slot, one in workers.items()),
                deadline_s=IDLE_S,
            )
        held = [line for slot, one in workers.items() for line in _held(slot, one)]
        for slot, worker in workers.items():
            assert worker.context is not None
            try:
                worker.context.engine.pool.check()
            except AssertionError as error:
                held.append(f"{slot}: {error}")
        return self.leaks + held + self.mini.failed


def _held(slot: str, worker: WorkerProcess) -> list[str]:
    """Say what a worker holds, in at most one line."""
    context = worker.context
    assert context is not None
    engine, exchange = context.engine, context.exchange
    counts = engine.pool.counts()
    tickets = len(exchange.receiver.book)
    is_idle = engine.scheduler.is_idle()
    if is_idle and not (counts.used or counts.quarantined or tickets or exchange.in_flight_bytes):
        return []
    return [f"{slot} holds {counts}, {tickets} tickets, {exchange.in_flight_bytes} bytes in flight"]


@asynccontextmanager
async def fuzzed_cluster(
    seed: int, models: Mapping[str, Path], redis_url: str
) -> AsyncIterator[FuzzedCluster]:
    """Run a cluster whose shape follows ``seed``."""
    shape = shape_of(random.Random(f"shape {seed}"))
    fixed: dict[str, Any] = {"prefill": COUNT, "decode": COUNT, **EXACT, **_TIMES}
    async with mini_cluster(models[MODELS[0]], redis_url, **fixed, **shape) as mini:
        cluster = FuzzedCluster(mini, models)
        cluster.log(f"{shape}")
        try:
            yield cluster
        finally:
            for router in cluster.routers[1:]:
                await router.close()
