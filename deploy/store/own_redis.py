"""Checks of a Redis that the operator names: it must answer, and should evict no keys."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit

import redis
import redis.asyncio

from baton.errors import ConfigError
from baton.store.redis_client import redis_client

_PING_S = 3.0


async def check_redis(url: str, flag: str = "--redis-url") -> str:
    """Check that the operator's server answers. Raises ConfigError with the reason.

    Returns advice for the operator, empty where the server evicts no keys.
    """
    where = _without_password(url)
    try:
        async with asyncio.timeout(_PING_S), redis_client(url) as client:
            await client.ping()
            advice = eviction_advice(await eviction_policy(client))
    except TimeoutError:
        raise ConfigError(f"{flag} {where}: no answer within {_PING_S:.0f} s") from None
    except (redis.RedisError, OSError, ValueError) as error:
        raise ConfigError(f"{flag} {where}: {error}") from error
    return advice and f"{flag} {where} {advice}"


async def eviction_policy(client: redis.asyncio.Redis) -> str | None:
    """A server's eviction policy: ``noeviction`` where it evicts none, None where it does not say.

    Raises ``redis.RedisError``.
    """
    try:
        memory = await client.info("memory")
    except redis.ResponseError:
        # INFO is forbidden to this user, or to all users, as on some managed servers.
        return None
    if memory.get("maxmemory") == 0:
        return "noeviction"
    policy = memory.get("maxmemory_policy")
    return None if policy is None else str(policy)


def eviction_advice(policy: str | None) -> str:
    """What an operator should do about an ``eviction_policy``; empty where that is nothing."""
    if policy == "noeviction":
        return ""
    if policy is None:
        return (
            "does not say whether it evicts keys (INFO is forbidden to this user): make sure that"
            " its maxmemory-policy is noeviction"
        )
    return (
        f"evicts keys when its memory is full (maxmemory-policy {policy}), and workers and cached"
        " blocks are unknown until they are written again: CONFIG SET maxmemory-policy noeviction"
    )


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
