"""Tells the prefix index in Redis what this worker stores and drops."""

from __future__ import annotations

import logging

import redis

from baton.prefix_index import PrefixIndex
from engine.block_pool import BlockPool

log = logging.getLogger(__name__)


class IndexPublisher:
    """Owned by the control loop. Redis may be away: then a snapshot follows its return."""

    def __init__(self, index: PrefixIndex, pool: BlockPool, incarnation: str) -> None:
        self._index = index
        self._pool = pool
        self._incarnation = incarnation
        self._generation = b""
        self._sequence = -1

    async def publish(self, *, verify: bool = False) -> None:
        """Send what has changed since the last call; ``verify`` asks even if nothing has.

        Raises ``redis.RedisError``.
        """
        stored, removed = self._pool.drain_changes()
        if self._sequence >= 0:
            if not (stored or removed or verify):
                return
            try:
                applied = await self._index.apply(
                    self._incarnation, self._generation, self._sequence, stored, removed
                )
            except redis.RedisError:
                self._sequence = -1
                raise
            if applied:
                self._sequence += 1
                return
            log.info("the prefix index has lost track of this worker: sending a snapshot")
        # Changes made while the snapshot is on its way are sent after it.
        self._sequence = -1
        self._pool.drain_changes()
        held = self._pool.held_hashes()
        self._generation, self._sequence = await self._index.snapshot(self._incarnation, held)
