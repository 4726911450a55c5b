"""The launcher's lease: a key in Redis with a TTL, which shows other machines that it runs.

    free ─take()→ held ─renewed every RENEW_S→ held ─give_up()→ free
    held ─not renewed for TTL_S→ free

Workers and the supervisor on other machines watch the lease, and exit once it has been free for
``GONE_S``: another launcher of the same cluster may start within that time, and takes them over.
While Redis is unreachable, the state of the lease is unknown and no process exits.

A launcher also records a hash of its workers' configuration, so that the next launcher knows
whether it can keep them.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import time
from typing import Any, NoReturn, cast

import redis
import redis.asyncio

from baton.config.cluster import Config
from baton.errors import BatonError
from baton.liveness.silence import SilenceWatch
from baton.store.redis_client import redis_client
from baton.version import VERSION

TTL_S = 15
RENEW_S = 3.0
GONE_S = 60.0
_POLL_S = 2.0
# A lease that lasts longer than its TTL shows that the server's clock was set back. The excess is
# removed: a running holder renews it in time.
_TAKE = """
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then
  if redis.call('TTL', KEYS[1]) > tonumber(ARGV[2]) then
    redis.call('EXPIRE', KEYS[1], ARGV[2])
  end
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'EX', ARGV[2])
return 1
"""
_GIVE_UP = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 1
"""
_FRONTS = ("http", "grpc", "admin_http", "routers", "allowed_hosts", "allowed_origins")
_STORE = ("insecure_listen", "insecure_redis", "redis_router_url")
_KEYS = ("keys", "keys_file", "tenants", "require_key")
_ADVANCED = ("head_deadline_s", "max_connections_per_client")
OF_ROUTERS = frozenset((*_FRONTS, *_KEYS, *_STORE, "data_dir"))
OF_LAUNCHERS = frozenset(("ray_address", "leave_workers"))

log = logging.getLogger(__name__)


class LauncherLease:
    """One launcher's lease of a cluster. Owned by one event loop."""

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str, holder: str) -> None:
        """``holder`` is the unique name of this launcher."""
        self._client = client
        self._key = _key(cluster_id)
        self._cluster_id = cluster_id
        self._holder = holder

    async def take(self) -> None:
        """Take the lease after its last holder is gone.

        Raises BatonError if that holder keeps renewing it.
        """
        # The lease of a killed launcher lasts until its TTL is over.
        ends_at = time.monotonic() + TTL_S + RENEW_S
        while not await self._hold():
            if time.monotonic() > ends_at:
                raise BatonError(
                    f"another launcher has the cluster {self._cluster_id}: stop that one, or give "
                    "this one another cluster_id"
                )
            await asyncio.sleep(1.0)

    async def keep(self) -> NoReturn:
        """Renew the lease until cancelled. Raises BatonError when another launcher has it."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                held = await self._hold()
            except redis.RedisError as error:
                log.warning("cannot renew the launcher's lease: %s", error)
                continue
            if not held:
                raise BatonError(f"another launcher has taken the cluster {self._cluster_id}")

    async def give_up(self) -> None:
        """Free the lease if this launcher holds it. Raises ``redis.RedisError``."""
        await cast(Any, self._client.eval(_GIVE_UP, 1, self._key, self._holder))

    async def _hold(self) -> bool:
        held = await cast(Any, self._client.eval(_TAKE, 1, self._key, self._holder, str(TTL_S)))
        return bool(held)


async def lease_lost(redis_url: str, cluster_id: str) -> None:
    """Return when the lease of a cluster's launcher has been free for ``GONE_S``."""
    free = SilenceWatch[str](GONE_S)
    async with redis_client(redis_url) as client:
        while True:
            try:
                held = bool(await client.exists(_key(cluster_id)))
            except (redis.RedisError, OSError):
                # The launcher cannot renew it either while Redis is unreachable.
                held = True
            if free.tick({} if held else {_key(cluster_id): 0}, time.monotonic()):
                return
            await asyncio.sleep(_POLL_S)


def _key(cluster_id: str) -> str:
    return f"baton:{{{cluster_id}}}:launcher"


class LauncherClaim:
    """The launcher's lease of a cluster, and the hash of its workers' configuration. Owned by the
    launcher's event loop."""

    def __init__(self, config: Config, redis_url: str, cluster_id: str) -> None:
        self._hash = workers_hash(config)
        self._client = redis_client(redis_url)
        self._lease = LauncherLease(self._client, cluster_id, secrets.token_hex(8))
        self._key = workers_hash_key(cluster_id)

    async def take(self) -> bool:
        """Take the lease. Returns whether workers of an earlier launcher with another configuration
        may still run.

        Raises BatonError if another launcher has the lease, and ``redis.RedisError``.
        """
        await self._lease.take()
        before = await self._client.getset(self._key, self._hash)
        return before is not None and before != self._hash.encode()

    async def keep(self) -> NoReturn:
        """Renew the lease until cancelled. Raises BatonError when another launcher has it."""
        await self._lease.keep()

    async def give_up(self) -> None:
        """Free the lease. Raises ``redis.RedisError``."""
        await self._lease.give_up()

    async def close(self) -> None:
        """Close the connections to Redis."""
        await self._client.aclose()


def workers_hash(config: Config) -> str:
    """Return a hash of the parts of a cluster's configuration that affect its workers."""
    left_out: dict[str, Any] = {
        **dict.fromkeys(OF_ROUTERS | OF_LAUNCHERS, True),
        "advanced": set(_ADVANCED),
    }
    said = config.model_dump(mode="json", exclude=left_out)
    text = json.dumps([VERSION, said], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def workers_hash_key(cluster_id: str) -> str:
    """Return the Redis key under which the hash of the workers' configuration is stored, for one
    cluster."""
    return f"baton:{{{cluster_id}}}:told"
