"""Copies blocks down the tiers before they are evicted, so that no step waits for a copy.

Owned by the event loop. A thread of low priority copies the bytes, a few blocks at a time and no
faster than ``BYTES_PER_S``. A block is not pinned meanwhile: see ``engine.scheduling.block_tiers``.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from functools import partial

from baton.errors import ChecksumMismatch
from baton.telemetry.worker_metrics import TierSeries
from engine.scheduling.block_tiers import BlockTiers, Spill
from kvtransfer.memory import copying
from kvtransfer.memory.memory import BlockMemory
from worker.offload.tier_storage import TierStorage
from worker.offload.tier_thread import TierThread

log = logging.getLogger(__name__)

BYTES_PER_S = {"host": 4e9, "disk": 2.5e8}
"""Maximum bytes per second of copies to each tier. Decode needs the same memory bandwidth, and
other programs use the disk."""
_BATCH_BYTES = 4 << 20
"""Maximum bytes that are copied at a time. After each such batch, the event loop checks again which
blocks are the oldest."""


class TierSpiller:
    """Copies blocks of the pool to the first tier, and of each tier to the next one."""

    def __init__(
        self,
        tiers: BlockTiers,
        storages: Mapping[str, TierStorage],
        memory: BlockMemory,
        thread: TierThread,
        series: Mapping[str, TierSeries],
    ) -> None:
        """``storages`` and ``series`` have one value for each tier's name. Other code must not use
        ``memory``."""
        self._tiers = tiers
        self._storages = storages
        self._memory = memory
        self._thread = thread
        self._series = series
        self._awake = asyncio.Event()

    def wake(self) -> None:
        """Wake the spiller if there are blocks to copy. This call is cheap, because it is made
        after every step."""
        if self._tiers.wants_spill:
            self._awake.set()

    async def run(self) -> None:
        """Copy blocks whenever there are some to copy, until cancelled."""
        while True:
            self._awake.clear()
            while spills := self._take():
                began = time.monotonic()
                outcomes = await self._thread.submit(partial(self._copy_all, spills))
                for spill, error in zip(spills, outcomes, strict=True):
                    self._end(spill, error)
                min_s = sum(self._memory.block_bytes / _rate(spill) for spill in spills)
                await asyncio.sleep(max(0.0, began + min_s - time.monotonic()))
            await self._awake.wait()

    def _take(self) -> list[Spill]:
        spills: list[Spill] = []
        most = max(1, _BATCH_BYTES // self._memory.block_bytes)
        while len(spills) < most and (spill := self._tiers.next_spill()) is not None:
            spills.append(spill)
        return spills

    def _copy_all(self, spills: list[Spill]) -> list[OSError | ChecksumMismatch | None]:
        """Copy blocks as ``spills`` describe. Returns the error of each copy, or None where a copy
        succeeded. Runs on the spiller's thread."""
        return [self._copy(spill) for spill in spills]

    def _copy(self, spill: Spill) -> OSError | ChecksumMismatch | None:
        try:
            self._storages[spill.target.name].store(spill.copy.slot, partial(self._fill, spill))
        except (OSError, ChecksumMismatch) as error:
            return error
        return None

    def _fill(self, spill: Spill, out: memoryview) -> int:
        if spill.source is None:
            return self._memory.read(spill.place, 0, out)
        storage = self._storages[spill.source.name]
        return storage.load(spill.place, partial(copying.copy, out))

    def _end(self, spill: Spill, error: OSError | ChecksumMismatch | None) -> None:
        tier = spill.target
        # A damaged source says nothing about the target slot.
        is_full = isinstance(error, OSError)
        kept = self._tiers.end_spill(spill, failed=is_full, damaged=error is not None)
        series = self._series[tier.name]
        if kept:
            series.stored_bytes.inc(self._memory.block_bytes)
        if error is not None:
            series.failures("write" if is_full else "checksum").inc()
            reason = error.strerror if isinstance(error, OSError) else error.message
            log.warning(
                "cannot copy a KV block to %s, which is limited to %d blocks from now on: %s",
                tier.name,
                tier.total,
                reason,
            )


def _rate(spill: Spill) -> float:
    return BYTES_PER_S[spill.target.name]
