"""Choosing how many workers a pool is to have, for operators. Owned by the router's event loop.

What is chosen is written down in Redis, where the supervisor finds it: it starts workers, and
drains those with the highest numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import redis

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import InvalidRequest, LastWorker, NotFound, Unavailable
from baton.store.supervision import MAX_WORKERS, PoolSizes
from router.routing.policy import route_settings


class PoolScaling:
    """See the module's text."""

    def __init__(self, config: Config, sizes: PoolSizes) -> None:
        self._pools = {pool.name: pool for pool in config.pools}
        self._sizes = sizes
        routes = route_settings(config).classes
        self._needs_prefill = {
            name: [
                pool.name
                for pool in config.pools
                if pool.role == "prefill" and route.prefill.allows(pool.name)
            ]
            for name, route in routes.items()
            if route.local_prefill == "never"
        }
        """The prefill pools of each class whose prompts no decode worker computes."""

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

    async def scale(self, pool: str, count: int, *, force: bool = False) -> int:
        """Choose a pool's size; returns the size that it was to have until now.

        Raises NotFound where there is no such pool, InvalidRequest for too many workers and where
        no worker would be left to decode, LastWorker where none would be left to prefill a class
        that needs one and ``force`` is false, Unavailable while Redis does not answer.
        """
        if pool not in self._pools:
            known = ", ".join(sorted(self._pools))
            raise NotFound(f"there is no pool {pool!r}; known: {known}", param="pool")
        if not 0 <= count <= MAX_WORKERS:
            raise InvalidRequest(f"a pool has at most {MAX_WORKERS} workers", param="count")
        try:
            sizes = await self._read()
            if not self._decode_workers(sizes | {pool: count}):
                raise InvalidRequest(
                    f"no decode worker would be left without {pool!r}, and nothing can be served",
                    param="count",
                )
            if not force:
                self._check_prefill(pool, sizes | {pool: count})
            await self._sizes.write(pool, count)
        except redis.RedisError as error:
            raise Unavailable(f"Redis does not answer: {pool!r} stays as it is") from error
        return sizes[pool]

    def _check_prefill(self, pool: str, sizes: dict[str, int]) -> None:
        for name, pools in self._needs_prefill.items():
            if pool in pools and not any(sizes[one] for one in pools):
                raise LastWorker(
                    f"no prefill worker would be left for requests of class {name!r}, and its"
                    " local_prefill is never: they could not be served. Repeat this with force to"
                    " do it all the same",
                    param="force",
                )

    async def _read(self) -> dict[str, int]:
        sizes = {name: pool.count for name, pool in self._pools.items()}
        chosen = await self._sizes.read()
        return sizes | {name: count for name, count in chosen.items() if name in sizes}

    def _decode_workers(self, sizes: dict[str, int]) -> int:
        return sum(sizes[name] for name, pool in self._pools.items() if pool.role == "decode")
