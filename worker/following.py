"""A rank of a worker but its first: the process beside the worker's own.

    connecting ─the group has formed→ loading ─→ ready ─steps come→ following ─rank 0 closes→ over
    any ─rank 0 is lost, or anything fails→ ``run`` raises, or ``on_lost`` is called amid a step

It has weights and KV blocks, and no sequences, calls or registry entry of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from engine.engine import build_following, device_of
from engine.parallel.ranks import FORM_S, FollowingRank
from engine.parallel.step_channel import GroupAddress
from worker.cores import give_way
from worker.engine_start import engine_settings
from worker.pool_memory import PoolMemory
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

OnLost = Callable[[str], None]
"""Ends the process: its thread may be inside a collective operation that waits for others."""


class FollowingWorker:
    """Rank ``rank``, from 1, of the worker that ``settings`` describe."""

    def __init__(
        self, settings: WorkerSettings, rank: int, address: GroupAddress, process: str = ""
    ) -> None:
        """``address`` is where its rank 0 listens, which is told what names this ``process``."""
        self._settings = settings
        self._rank = rank
        self._address = address
        self._process = process

    def run(self, on_lost: OnLost) -> None:
        """Compute what rank 0 says, until it closes. Blocks. Raises BatonError."""
        settings, ranks = self._settings, self._settings.pool.tp
        built = engine_settings(settings)
        memory = PoolMemory(shared=settings.config.transport in ("auto", "shm"))
        following = FollowingRank(self._address, self._rank, ranks, FORM_S, self._process)
        try:
            group = following.form(device_of(built), on_lost)
            model, cache = build_following(built, group, memory.allocate)
            following.ready("none")
            log.info("%s: rank %d of %d is ready", settings.slot, self._rank, ranks)
            if settings.core_board:
                give_way()
            following.run(model, cache)
        finally:
            following.close()
            memory.close()
