"""Choosing how many workers a pool is to have, for operators. Owned by the router's event loop.

What is chosen is written down in Redis, where the supervisor finds it: it starts workers, and
drains those with the highest numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis

from baton.config import PoolConfig
from baton.errors import InvalidRequest, NotFound, Unavailable
from baton.pool_sizes import MOST_WORKERS, PoolSizes


class PoolScaling:
    """See the module's text."""

    def __init__(self, pools: Sequence[PoolConfig], sizes: PoolSizes) -> None:
        self._pools = {pool.name: pool for pool in pools}
        self._sizes = sizes

    @property
    def pools(self) -> Sequence[PoolConfig]:
        """As they are configured."""
        return tuple(self._pools.values())

    async def sizes(self) -> dict[str, int]:
        """How many workers each pool should have. Raises Unavailable if Redis does not answer."""
        try:
            return await self._read()
        except redis.RedisError as error:
            raise Unavailable("Redis does not answer: the pools' sizes are unknown") from error

    async def scale(self, pool: str, count: int) -> int:
        """Choose a pool's size; returns the size that it was to have until now.

        Raises NotFound where there is no such pool, InvalidRequest for too many workers and where
        nobody would be left to decode, Unavailable while Redis does not answer.
        """
        if pool not in self._pools:
            known = ", ".join(sorted(self._pools))
            raise NotFound(f"there is no pool {pool!r}; known: {known}", param="pool")
        if not 0 <= count <= MOST_WORKERS:
            raise InvalidRequest(f"a pool has at most {MOST_WORKERS} workers", param="count")
        try:
            sizes = await self._read()
            if not self._decode_workers(sizes | {pool: count}):
                raise InvalidRequest(
                    f"no decode worker would be left without {pool!r}, and nothing can be served",
                    param="count",
                )
            await self._sizes.write(pool, count)
        except redis.RedisError as error:
            raise Unavailable(f"Redis does not answer: {pool!r} stays as it is") from error
        return sizes[pool]

    async def _read(self) -> dict[str, int]:
        sizes = {name: pool.count for name, pool in self._pools.items()}
        chosen = await self._sizes.read()
        return sizes | {name: count for name, count in chosen.items() if name in sizes}

    def _decode_workers(self, sizes: dict[str, int]) -> int:
        return sum(sizes[name] for name, pool in self._pools.items() if pool.role == "decode")
