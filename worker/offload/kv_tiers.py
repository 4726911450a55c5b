"""A worker's KV tiers: block bookkeeping, storage, and the threads that copy.

    built ─start→ running ─stop→ stopped

Owned by the engine core, which calls it before and after it schedules steps.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from baton.config.choices import MIB
from baton.config.cluster import Config
from baton.host.background import end_tasks
from baton.host.cache import cache_dir
from baton.telemetry.worker_metrics import TierSeries, WorkerMetrics
from engine.engine import Engine
from engine.scheduling.block_tier import BlockTier
from engine.scheduling.block_tiers import BlockTiers
from engine.scheduling.sequence import Sequence
from kvtransfer.memory.memory import BlockMemory
from worker.costs.step_costs import StepCosts
from worker.offload.tier_estimates import TierEstimates
from worker.offload.tier_loader import TierLoader
from worker.offload.tier_spiller import TierSpiller
from worker.offload.tier_storage import DiskStorage, HostStorage, TierStorage
from worker.offload.tier_thread import TierThread

log = logging.getLogger(__name__)


def make_storages(config: Config, block_bytes: int) -> dict[str, tuple[int, TierStorage]]:
    """Make the storage of each configured tier, the fastest first: tier name → (number of slots,
    storage).

    Allocates the memory and opens the file, which may take seconds. Raises ConfigError.
    """
    storages: dict[str, tuple[int, TierStorage]] = {}
    slots = config.kv_host_mib * MIB // block_bytes
    if slots:
        storages["host"] = slots, HostStorage(slots, block_bytes)
    slots = config.kv_disk_mib * MIB // block_bytes
    if slots:
        folder = Path(config.kv_disk_path).expanduser() if config.kv_disk_path else _disk_folder()
        storages["disk"] = slots, DiskStorage(folder, slots, block_bytes)
        free = shutil.disk_usage(folder).free
        if free < slots * block_bytes:
            log.warning(
                "kv_disk_mib is %d MiB, and %s has %d MiB left: fewer blocks will be kept",
                config.kv_disk_mib,
                folder,
                free // MIB,
            )
    return storages


def _disk_folder() -> Path:
    return cache_dir() / "kv"


class KvTiers:
    """The offload tiers of one worker, with their threads and metrics."""

    def __init__(
        self,
        engine: Engine,
        storages: Mapping[str, tuple[int, TierStorage]],
        memories: Callable[[], BlockMemory],
        costs: StepCosts,
        metrics: WorkerMetrics,
        *,
        worker: str,
        role: str,
        estimates: TierEstimates | None = None,
    ) -> None:
        """Make the tiers on the event loop. ``storages`` comes from ``make_storages`` and is not
        empty.

        ``memories`` returns the pool's blocks; each result may be used by one thread at a time.
        """
        self._scheduler = engine.scheduler
        self._storages = {name: storage for name, (_, storage) in storages.items()}
        self.tiers = BlockTiers(
            engine.pool, [BlockTier(name, slots) for name, (slots, _) in storages.items()]
        )
        series = {name: metrics.tier(worker, role, name) for name in storages}
        self._series: Mapping[str, TierSeries] = series
        device = engine.runner.device
        # With a GPU, this thread keeps its priority, too. While it waited for a core, it could hold
        # the interpreter's lock, which the engine thread needs.
        self._down = TierThread("tier-spill", device, gives_way=device.type == "cpu")
        self._up = TierThread("tier-load", device, gives_way=False)
        self.spiller = TierSpiller(self.tiers, self._storages, memories(), self._down, series)
        self.loader = TierLoader(
            self.tiers,
            self._storages,
            memories(),
            self._up,
            scheduler=engine.scheduler,
            compute_s=lambda count, start: costs.chunk_ms(count, start) / 1e3,
            estimates=estimates or TierEstimates(storages),
            series=series,
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the threads that copy blocks."""
        self._down.start()
        self._up.start()

    async def run(self) -> None:
        """Copy blocks to the tiers before the pool evicts them, until this task is cancelled."""
        await self.spiller.run()

    async def stop(self, timeout_s: float) -> None:
        """Stop copying blocks. A copy in flight is awaited for up to ``timeout_s`` seconds."""
        await end_tasks(self._tasks)
        ended = [await asyncio.to_thread(each.stop, timeout_s) for each in (self._down, self._up)]
        if all(ended):
            for storage in self._storages.values():
                storage.close()

    @property
    def is_idle(self) -> bool:
        """Whether no block of the pool is being loaded from a tier."""
        return self.loader.is_idle

    def counts(self) -> dict[str, int]:
        """Return the number of blocks in each tier that can be found by hash."""
        return {tier.name: len(tier) for tier in self.tiers.tiers}

    # Calls of the engine core

    def before_schedule(self, schedule: Callable[[], None]) -> None:
        """If the first queued sequence was preempted and a tier holds its blocks, start to load
        them.

        ``schedule`` schedules steps once the blocks are loaded; it is not called within this
        call.
        """
        waiting = self._scheduler.waiting
        first = waiting[0] if waiting else None
        if first is None or not first.preempted or first.returning:
            return
        if first.block_table or first.in_flight or not self.loader.may_return(first):
            return
        first.returning = True
        task = asyncio.create_task(self._bring_back(first, schedule), name="tier-return")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _bring_back(self, sequence: Sequence, schedule: Callable[[], None]) -> None:
        try:
            await self.loader.bring_back(sequence)
        finally:
            sequence.returning = False
            schedule()

    def after_schedule(self) -> None:
        """Start to copy blocks that are no longer in use to the first tier, and update the tiers'
        metrics."""
        self.spiller.wake()
        for tier in self.tiers.tiers:
            self._series[tier.name].blocks.set(len(tier))
