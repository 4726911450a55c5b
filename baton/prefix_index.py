"""The prefix index in Redis: block hash → the incarnations that hold it.

A worker applies batches of stored and removed hashes. A batch counts only if it follows the last
one (its sequence number) in the same index (its generation); otherwise the worker sends all that it
holds. A lookup answers, in one round trip, how many leading blocks each worker holds.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, cast

import redis.asyncio

# KEYS: generation, the worker's own state. ARGV: prefix of block keys, incarnation, generation,
# sequence number, how many stored, the stored hashes, the removed hashes.
_APPLY = """
if redis.call('GET', KEYS[1]) ~= ARGV[3] then return 0 end
if redis.call('GET', KEYS[2]) ~= ARGV[4] then return 0 end
local stored = tonumber(ARGV[5])
for i = 6, #ARGV do
  local key = ARGV[1] .. ARGV[i]
  if i < 6 + stored then
    redis.call('SADD', key, ARGV[2])
    redis.call('SADD', KEYS[3], ARGV[i])
  else
    redis.call('SREM', key, ARGV[2])
    redis.call('SREM', KEYS[3], ARGV[i])
  end
end
redis.call('INCR', KEYS[2])
return 1
"""

# KEYS: generation, the worker's state, what it holds. ARGV: a new generation in case there is none.
_BEGIN_SNAPSHOT = """
redis.call('SETNX', KEYS[1], ARGV[1])
redis.call('SET', KEYS[2], 0)
return redis.call('GET', KEYS[1])
"""

# KEYS: the worker's state, what it holds. ARGV: prefix of block keys, incarnation, most to drop.
# The state goes first: a worker that lives after all can apply nothing more, and sends a snapshot.
_COLLECT = """
redis.call('DEL', KEYS[1])
local hashes = redis.call('SPOP', KEYS[2], ARGV[3])
for _, hash in ipairs(hashes) do
  redis.call('SREM', ARGV[1] .. hash, ARGV[2])
end
return #hashes
"""

# ARGV: prefix of block keys, hashes from the first block on. Answers incarnation, depth, …
_LOOKUP = """
local depth = {}
local alive = nil
for i = 2, #ARGV do
  local members = redis.call('SMEMBERS', ARGV[1] .. ARGV[i])
  local still = {}
  local any = false
  for _, member in ipairs(members) do
    if i == 2 or alive[member] then
      still[member] = true
      depth[member] = i - 1
      any = true
    end
  end
  if not any then break end
  alive = still
end
local answer = {}
for member, blocks in pairs(depth) do
  answer[#answer + 1] = member
  answer[#answer + 1] = blocks
end
return answer
"""

COLLECT_BATCH = 1000
"""Hashes dropped in one call of the collector: about 2 ms of the server's time."""
SNAPSHOT_BATCH = 2000
"""Hashes sent in one call of a snapshot."""


class PrefixIndex:
    """The index of one cluster. Raises ``redis.RedisError``."""

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str) -> None:
        self._client = client
        self._prefix = f"baton:{{{cluster_id}}}:index"
        self._blocks = f"{self._prefix}:block:"
        self._apply = client.register_script(_APPLY)
        self._begin = client.register_script(_BEGIN_SNAPSHOT)
        self._collect = client.register_script(_COLLECT)
        self._lookup = client.register_script(_LOOKUP)

    def _keys(self, incarnation: str) -> list[str]:
        return [
            f"{self._prefix}:generation",
            f"{self._prefix}:sequence:{incarnation}",
            f"{self._prefix}:held:{incarnation}",
        ]

    async def apply(
        self,
        incarnation: str,
        generation: bytes,
        sequence: int,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
    ) -> bool:
        """Apply a batch. False: the index has lost track of this worker; send a snapshot."""
        head: list[Any] = [self._blocks, incarnation, generation, sequence, len(stored)]
        answer = await cast(
            Any, self._apply(keys=self._keys(incarnation), args=[*head, *stored, *removed])
        )
        return bool(answer)

    async def snapshot(self, incarnation: str, held: Sequence[bytes]) -> tuple[bytes, int]:
        """Make ``held`` all that the index knows of a worker.

        Returns the generation and the sequence number of the batch that comes next.
        """
        keys = self._keys(incarnation)
        await self.collect(incarnation)
        generation = cast(
            bytes, await cast(Any, self._begin(keys=keys, args=[secrets.token_hex(8)]))
        )
        sequence = 0
        for start in range(0, len(held), SNAPSHOT_BATCH):
            batch = held[start : start + SNAPSHOT_BATCH]
            if not await self.apply(incarnation, generation, sequence, batch, ()):
                break
            sequence += 1
        return generation, sequence

    async def collect(self, incarnation: str) -> None:
        """Drop all entries of an incarnation, a bounded batch at a time."""
        keys = self._keys(incarnation)
        args: list[Any] = [self._blocks, incarnation, COLLECT_BATCH]
        while await cast(Any, self._collect(keys=keys[1:], args=args)) == COLLECT_BATCH:
            pass

    async def forget_generation(self) -> None:
        """Leave nothing behind once every incarnation is collected.

        A worker that lives after all sends a snapshot, which begins another generation.
        """
        await cast(Any, self._client.delete(f"{self._prefix}:generation"))

    async def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of ``hashes`` each incarnation holds; absent means none."""
        if not hashes:
            return {}
        answer = await cast(Any, self._lookup(keys=[], args=[self._blocks, *hashes]))
        pairs = zip(answer[::2], answer[1::2], strict=True)
        return {member.decode(): int(depth) for member, depth in pairs}
