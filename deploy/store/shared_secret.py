"""The secret of a cluster whose configuration has none, in an operator's own Redis.

Launchers and routers of the cluster find it there by the cluster's id. The first of them generates
it. All of them write it again and again: if Redis loses it while no launcher is there, the next
launcher would give its workers another secret than the routers have. The user of workers cannot
read it (``redis/users.acl``). A cluster without an id, or with an embedded store, does not need it:
its launcher passes the secret to all other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import NoReturn, cast

import redis

from baton.config.cluster import Config
from baton.errors import Unavailable
from baton.security.cluster_secret import new_secret
from baton.store.redis_client import redis_client

_AGAIN_S = 1.0
_READ_S = 10.0


class SharedSecret:
    """The secret of one cluster in Redis."""

    def __init__(self, redis_url: str, cluster_id: str) -> None:
        """``redis_url`` must have the store user of launchers or the one of routers."""
        self._url = redis_url
        self._key = f"baton:{{{cluster_id}}}:secret"

    @classmethod
    def of(cls, config: Config, redis_url: str) -> SharedSecret | None:
        """Return the handle of the cluster's shared secret. None if the configuration has a secret,
        or if no other process must find it."""
        if config.cluster_secret or not config.redis_url or not config.cluster_id:
            return None
        return cls(redis_url, config.cluster_id)

    async def read(self) -> str:
        """Return the cluster's secret. If there is none yet, generate and store one. Raises
        Unavailable."""
        try:
            async with asyncio.timeout(_READ_S), redis_client(self._url) as client:
                await client.set(self._key, new_secret(), nx=True)
                found = cast(bytes | None, await client.get(self._key))
        except (redis.RedisError, OSError, TimeoutError) as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(
                f"cannot read the cluster's secret from Redis ({reason}): fix that, or set "
                "BATON_CLUSTER_SECRET for all launchers, routers and workers of the cluster"
            ) from error
        assert found is not None, "it was just written"
        return found.decode()

    async def keep(self, secret: str) -> NoReturn:
        """Write ``secret`` to Redis repeatedly: Redis may lose its data, and a router may start
        after that."""
        async with redis_client(self._url) as client:
            while True:
                await asyncio.sleep(_AGAIN_S)
                with contextlib.suppress(redis.RedisError, OSError):
                    await client.set(self._key, secret)

    def keep_in_thread(self, secret: str) -> None:
        """Do what ``keep`` does on a thread that lives as long as the process."""
        threading.Thread(
            target=lambda: asyncio.run(self.keep(secret)), name="cluster secret", daemon=True
        ).start()
