"""A launcher's claim on a cluster whose workers live on several machines.

While it has the lease it is the one launcher. What workers were told is remembered as a hash: so a
launcher knows whether those that one before it has left can be kept.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from importlib.metadata import version
from typing import NoReturn

from baton.config.cluster import Config
from baton.store.redis_client import redis_client
from deploy.processes.launcher_lease import LauncherLease

_FRONTS = ("http", "grpc", "admin_http", "routers", "allowed_hosts", "allowed_origins")
_STORE = ("insecure_listen", "redis_router_url")
_KEYS = ("keys", "keys_file", "tenants", "require_key")
_ADVANCED = ("head_deadline_s", "max_connections_per_client")
OF_ROUTERS = frozenset((*_FRONTS, *_KEYS, *_STORE, "data_dir"))
OF_LAUNCHERS = frozenset(("ray_address", "leave_workers"))


class LauncherClaim:
    """Owned by the launcher's event loop."""

    def __init__(self, config: Config, redis_url: str, cluster_id: str) -> None:
        self._told = what_workers_are_told(config)
        self._client = redis_client(redis_url)
        self._lease = LauncherLease(self._client, cluster_id, secrets.token_hex(8))
        self._key = told_key(cluster_id)

    async def take(self) -> bool:
        """Take the lease. Returns whether workers may be left that were told something else.

        Raises BatonError where another launcher has it, ``redis.RedisError``.
        """
        await self._lease.take()
        before = await self._client.getset(self._key, self._told)
        return before is not None and before != self._told.encode()

    async def keep(self) -> NoReturn:
        """As ``LauncherLease.keep``."""
        await self._lease.keep()

    async def give_up(self) -> None:
        """Free the lease. Raises ``redis.RedisError``."""
        await self._lease.give_up()

    async def close(self) -> None:
        """End its connections."""
        await self._client.aclose()


def what_workers_are_told(config: Config) -> str:
    """Two configurations that make the same workers have the same one."""
    left_out = {**dict.fromkeys(OF_ROUTERS | OF_LAUNCHERS, True), "advanced": set(_ADVANCED)}
    said = config.model_dump(mode="json", exclude=left_out)
    text = json.dumps([version("baton"), said], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def told_key(cluster_id: str) -> str:
    """In Redis: what the workers of a cluster were told."""
    return f"baton:{{{cluster_id}}}:told"
