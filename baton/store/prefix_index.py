"""The prefix index in Redis: block hash → the incarnations that hold it.

A worker applies batches of stored and removed hashes. A batch counts only if it follows the last
one (its sequence number) of the same snapshot; otherwise the worker sends all that it holds. A
lookup returns, in one round trip, how many leading blocks each worker holds.

Each snapshot of a worker is held under its own number. A worker that dies, or sends another
snapshot, loses the number. Its entries then count no more, and later calls of live workers drop
them step by step. The index stays within a given memory limit, and evicts the least recently used
blocks. ``baton/store/index_scripts.py`` describes the layout in Redis.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import redis.asyncio

from baton.store.held_blocks import HeldBlocks, held_by
from baton.store.index_scripts import APPLY, BEGIN, FIELD_BYTES, LOOKUP, RETIRE
from baton.store.registry_scripts import MAX_STEP

BATCH = 256
"""Maximum number of block hashes in one call that changes the index: about 0.4 ms of the server's
time."""
MAX_BLOCKS = 65535
"""Maximum number of leading blocks of a prompt that one lookup covers."""
DEFAULT_MEMORY_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class IndexSize:
    """Number of blocks in the index, and the memory that they take."""

    blocks: int
    """Number of distinct blocks in the index."""
    bytes: int
    """Approximate memory in Redis, in bytes."""


class PrefixIndex:
    """The index of one cluster. Raises ``redis.RedisError``. Owned by one event loop."""

    def __init__(
        self,
        client: redis.asyncio.Redis,
        cluster_id: str,
        *,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        """Create the prefix index of a cluster. ``memory_bytes`` is its maximum size.

        If workers pass different values, that of the worker that sent a snapshot last applies.
        """
        self._client = client
        self._state = f"baton:{{{cluster_id}}}:index"
        self._keys = [self._state, f"{self._state}:numbers", f"{self._state}:retired"]
        self._max_bytes = memory_bytes
        self._tag = b""
        self._names: dict[int, str] = {}
        self._begin = client.register_script(BEGIN)
        self._retire = client.register_script(RETIRE)
        self._apply = client.register_script(APPLY)
        self._lookup = client.register_script(LOOKUP)

    async def apply(
        self,
        incarnation: str,
        snapshot: bytes,
        sequence: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        *,
        tend: bool = False,
    ) -> bool:
        """Apply a worker's stored and removed hashes, preferably at most ``BATCH`` in one call.

        Returns False if the index has lost track of this worker, which must then send a snapshot. A
        repeated last batch returns True, and changes nothing. ``tend``: also keep the index alive
        and drop some entries of dead workers.
        """
        head: list[Any] = [incarnation, snapshot, sequence]
        changes: list[Any] = [b"".join(stored), b"".join(removed), int(tend)]
        return bool(await cast(Any, self._apply(keys=self._keys, args=[*head, *changes])))

    async def begin(self, incarnation: str) -> bytes:
        """Forget the entries of a worker in the index. The worker's next batch has the sequence
        number 0.

        Returns the name of the snapshot that begins.
        """
        args: list[Any] = [incarnation, secrets.token_hex(4), self._max_bytes, _step()]
        return cast(bytes, await cast(Any, self._begin(keys=self._keys, args=args)))

    async def snapshot(self, incarnation: str, held: Sequence[bytes]) -> tuple[bytes, int]:
        """Replace all entries of a worker by ``held``.

        Returns the snapshot's name and the sequence number of the next batch.
        """
        name = await self.begin(incarnation)
        sequence = 0
        for start in range(0, len(held), BATCH):
            batch = held[start : start + BATCH]
            if not await self.apply(incarnation, name, sequence, batch, ()):
                break
            sequence += 1
        return name, sequence

    async def collect(self, incarnation: str) -> None:
        """Forget an incarnation of a worker, so that its entries in the index no longer count.

        Later calls of ``apply`` with ``tend`` drop the entries.
        """
        await cast(Any, self._retire(keys=self._keys, args=[incarnation, _step()]))

    async def forget_generation(self) -> None:
        """Delete the index, after every incarnation is collected.

        A worker that is alive after all sends a snapshot, which begins another generation.
        """
        generation = await cast(Any, self._client.hget(self._state, "generation"))
        keys = list(self._keys)
        if generation is not None:
            keys.append(f"{self._state}:{generation.decode()}")
        await cast(Any, self._client.unlink(*keys))

    async def size(self) -> IndexSize:
        """Return the size of the index."""
        state = await cast(Any, self._client.hmget(self._state, ["generation", "bytes"]))
        if state[0] is None:
            return IndexSize(0, 0)
        blocks = await cast(Any, self._client.hlen(f"{self._state}:{state[0].decode()}"))
        return IndexSize(blocks, blocks * FIELD_BYTES + int(state[1] or 0))

    async def lookup(self, hashes: Sequence[bytes]) -> HeldBlocks:
        """Return how many leading blocks of ``hashes`` each incarnation holds. An incarnation that
        holds none is absent."""
        if not hashes:
            return held_by({})
        asked = b"".join(hashes[:MAX_BLOCKS])
        # This call's names: another call may bring a newer table during the await.
        tag, names = self._tag, self._names
        args: list[Any] = [tag, asked]
        answer = await cast(Any, self._lookup(keys=self._keys[:2], args=args))
        if answer[0] != tag:
            self._tag, self._names = answer[0], _names(answer[1])
            names = self._names
        return HeldBlocks.decoded(answer[2], names)


def _step() -> int:
    """Return a random amount by which the version of the table of numbers grows if the server's
    clock is behind it."""
    return 1 + secrets.randbelow(MAX_STEP)


def _names(table: bytes) -> dict[int, str]:
    """Parse the lines of the index's table of numbers. Return the incarnation of each number."""
    fields = table.decode().split("\n") if table else []
    return dict(zip(map(int, fields[::2]), fields[1::2], strict=True))
