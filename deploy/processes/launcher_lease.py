"""The launcher's lease: a key in Redis with a TTL, by which other machines know that it lives.

    free ─take()→ held ─renewed every RENEW_S→ held ─give_up()→ free
    held ─not renewed for TTL_S→ free

Workers and the supervisor on other machines watch it, and end once it was free for ``GONE_S``: so
long another launcher of the same cluster may take to come, and finds them at work. While Redis is
away nobody can tell, and nobody ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, NoReturn, cast

import redis
import redis.asyncio

from baton.errors import BatonError
from baton.liveness.silence import SilenceWatch
from baton.store.redis_client import redis_client

TTL_S = 15
RENEW_S = 3.0
GONE_S = 60.0
_POLL_S = 2.0
# Where a lease lasts for longer than its TTL, the clock of the server was set back. What is left is
# cut: a holder that lives renews it in time.
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

log = logging.getLogger(__name__)


class LauncherLease:
    """One launcher's hold on a cluster. Owned by one event loop."""

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str, holder: str) -> None:
        """``holder`` names this launcher, and no other."""
        self._client = client
        self._key = _key(cluster_id)
        self._cluster_id = cluster_id
        self._holder = holder

    async def take(self) -> None:
        """Hold it, once whoever had it before is gone. Raises BatonError where that goes on."""
        # One that was killed has it until its TTL is over.
        ends_at = time.monotonic() + TTL_S + RENEW_S
        while not await self._hold():
            if time.monotonic() > ends_at:
                raise BatonError(
                    f"another launcher has the cluster {self._cluster_id}: end that one, or give"
                    " this one another cluster_id"
                )
            await asyncio.sleep(1.0)

    async def keep(self) -> NoReturn:
        """Renew it until this is cancelled. Raises BatonError when another launcher has it."""
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                held = await self._hold()
            except redis.RedisError as error:
                log.warning("the launcher's lease cannot be renewed: %s", error)
                continue
            if not held:
                raise BatonError(f"another launcher has taken the cluster {self._cluster_id}")

    async def give_up(self) -> None:
        """Free it, if it is held here. Raises ``redis.RedisError``."""
        await cast(Any, self._client.eval(_GIVE_UP, 1, self._key, self._holder))

    async def _hold(self) -> bool:
        held = await cast(Any, self._client.eval(_TAKE, 1, self._key, self._holder, str(TTL_S)))
        return bool(held)


async def lease_lost(redis_url: str, cluster_id: str) -> None:
    """Return when the launcher of a cluster is gone, as its lease has it."""
    free = SilenceWatch[str](GONE_S)
    async with redis_client(redis_url) as client:
        while True:
            try:
                held = bool(await client.exists(_key(cluster_id)))
            except (redis.RedisError, OSError):
                # While Redis is away the launcher cannot renew it either.
                held = True
            if free.tick({} if held else {_key(cluster_id): 0}, time.monotonic()):
                return
            await asyncio.sleep(_POLL_S)


def _key(cluster_id: str) -> str:
    return f"baton:{{{cluster_id}}}:launcher"
