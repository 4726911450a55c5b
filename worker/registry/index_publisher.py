"""Publishes to the prefix index in Redis which blocks this worker stores and drops.

    unknown ─begin→ sending ─all is sent→ in step ─the pool changes→ sending
    sending, in step ─the index has lost track→ unknown

A snapshot uses the same messages as changes: once the index has forgotten the worker's blocks, all
that it holds become pending. So an interrupted snapshot continues where it stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Protocol

from baton.store.prefix_index import BATCH, PrefixIndex

log = logging.getLogger(__name__)

PUBLISH_EVERY_S = 0.05
"""Seconds between two messages to the prefix index with changes of the cache."""
_PUBLISH_REST = 10
"""Minimum pause between two calls of the prefix index, as a multiple of the last call's duration.
The pause is never longer than a heartbeat."""
_SPARE_CHANGES = 4096
"""Maximum number of changes that wait while the prefix index is unreachable, in addition to the
number of blocks that the worker can hold.

If more changes wait, it is cheaper to send all held blocks again.
"""


class HeldBlocks(Protocol):
    """The cached blocks to publish: those of a block pool, or those of a pool and its offload
    tiers."""

    @property
    def total(self) -> int:
        """Maximum number of blocks that the worker can hold."""

    def drain_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the hashes of blocks that were stored since the last call, and the hashes of
        blocks that were removed."""

    def held_hashes(self) -> list[bytes]:
        """Return the hashes of all blocks that the worker holds."""


class IndexPublisher:
    """Publishes one session's cached blocks to the prefix index. While Redis is unreachable,
    changes wait.

    Owned by the event loop.
    """

    def __init__(self, index: PrefixIndex, pool: HeldBlocks, incarnation: str) -> None:
        self._index = index
        self._pool = pool
        self._incarnation = incarnation
        self._snapshot = b""
        self._sequence = -1
        self._pending: dict[bytes, bool] = {}
        """Changes that were not sent yet: block hash → true if the worker holds the block."""
        self._batch: tuple[list[bytes], list[bytes]] | None = None
        """The batch of changes that was sent under the current sequence number and is not confirmed
        yet: (hashes of stored blocks, hashes of removed blocks)."""

    @property
    def pending_blocks(self) -> int:
        """Number of changes that the prefix index has not confirmed yet, one per block."""
        in_flight = 0 if self._batch is None else sum(map(len, self._batch))
        return len(self._pending) + in_flight

    async def publish(self, *, verify: bool = False) -> None:
        """Send the changes since the last call to the prefix index.

        With ``verify``, the index is called even without changes, to check that it still knows this
        worker. Raises ``redis.RedisError``; the next call continues where this one ended.
        """
        self._gather()
        for _ in range(2):
            if self._sequence < 0:
                await self._begin()
            if await self._send_all(verify=verify):
                return
            log.info("the prefix index has lost track of this worker: sending a snapshot")
            self._sequence = -1

    async def _send_all(self, *, verify: bool) -> bool:
        while self._batch is not None or self._pending or verify:
            if not await self._send(tend=verify):
                return False
            verify = False
        return True

    def _gather(self) -> None:
        stored, removed = self._pool.drain_changes()
        if self._sequence < 0:
            return
        self._pending.update(dict.fromkeys(stored, True))
        self._pending.update(dict.fromkeys(removed, False))
        if len(self._pending) > _SPARE_CHANGES + self._pool.total:
            self._sequence = -1

    async def _begin(self) -> None:
        self._sequence, self._batch = -1, None
        self._pending.clear()
        self._snapshot = await self._index.begin(self._incarnation)
        self._sequence = 0
        # Changes made meanwhile are part of what is held now.
        self._pool.drain_changes()
        self._pending = dict.fromkeys(self._pool.held_hashes(), True)

    async def _send(self, *, tend: bool) -> bool:
        """Send one batch of changes. The batch may have been sent before: the index detects
        duplicates.

        Returns False if the index no longer knows which blocks this worker holds.
        """
        if self._batch is None:
            taken = list(islice(self._pending.items(), BATCH))
            for digest, _ in taken:
                del self._pending[digest]
            stored = [digest for digest, held in taken if held]
            self._batch = stored, [digest for digest, held in taken if not held]
        if not await self._index.apply(
            self._incarnation, self._snapshot, self._sequence, *self._batch, tend=tend
        ):
            return False
        self._sequence += 1
        self._batch = None
        return True


async def keep_published(
    publisher: Callable[[], IndexPublisher],
    heartbeat_s: float,
    *,
    timed: Callable[[], AbstractContextManager[None]],
    report: Callable[[int, float], None],
) -> None:
    """Publish changes to the prefix index until cancelled. After an error, such as while Redis is
    unreachable, this retries after ``heartbeat_s`` seconds.

    ``publisher`` returns the current session's publisher. ``timed`` wraps each call of the index.
    ``report`` receives the number of unpublished blocks, and the seconds since all blocks were
    published.
    """
    verify_every = max(1, int(heartbeat_s / PUBLISH_EVERY_S))
    count = 0
    published_at = time.monotonic()
    while True:
        count += 1
        took = 0.0
        present = publisher()
        try:
            began = time.monotonic()
            with timed():
                await present.publish(verify=count % verify_every == 0)
            published_at = time.monotonic()
            took = published_at - began
            report(present.pending_blocks, took)
        except Exception as error:
            # No error on the way to Redis may end a worker that serves.
            log.warning("the prefix index cannot be reached: %s", str(error) or repr(error))
            report(present.pending_blocks, time.monotonic() - published_at)
            await asyncio.sleep(heartbeat_s)
        # Many workers may keep the server busy; then each sends less often.
        await asyncio.sleep(max(PUBLISH_EVERY_S, min(_PUBLISH_REST * took, heartbeat_s)))
