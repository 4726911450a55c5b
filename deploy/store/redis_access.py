"""How each role reaches the store: its user, its address, and checks of an operator's server.

``redis/users.acl`` lists the permissions of each user, which are only those that its role needs. An
operator's own server takes the same file, with the SHA-256 of passwords in place of ``@ROUTER@``
and so on.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import redis
import redis.asyncio

from baton.config.cluster import Config
from baton.config.tls import TlsConfig
from baton.errors import ConfigError
from baton.store.redis_client import redis_client

StoreUser = Literal["router", "worker", "supervisor"]
STORE_USERS: tuple[StoreUser, ...] = ("router", "worker", "supervisor")
USERS_FILE = Path(__file__).parents[1] / "redis" / "users.acl"
_PING_S = 3.0


def user_rules(passwords: Mapping[StoreUser, str]) -> list[str]:
    """Return the lines that define the store users, for a server's configuration or its ACL file.
    They contain hashes of the passwords."""
    text = USERS_FILE.read_text()
    for user, password in passwords.items():
        text = text.replace(f"@{user.upper()}@", hashlib.sha256(password.encode()).hexdigest())
    return text.splitlines()


def url_with_user(url: str, user: StoreUser, password: str) -> str:
    """Return ``url`` with another user and that user's password."""
    parts = urlsplit(url)
    where = parts.netloc.rpartition("@")[2]
    return parts._replace(netloc=f"{user}:{quote(password, safe='')}@{where}").geturl()


def store_url(config: Config, user: StoreUser, shows: StoreUser | None = None) -> str:
    """Return the address of an operator's own server for the store user ``user``. Empty if no
    server is configured.

    A ``rediss`` address may name certificates in its query. Without them, the cluster's
    certificates are added: those of the role ``shows``, or of ``user``.
    """
    own = {"router": config.redis_router_url, "worker": config.redis_worker_url}.get(user)
    return url_with_certificates(own or config.redis_url, config.tls, shows or user)


def url_with_certificates(url: str, tls: TlsConfig, user: StoreUser) -> str:
    """Return ``url`` with the cluster's certificates in its query, if its scheme is ``rediss``.
    Otherwise return it unchanged."""
    parts = urlsplit(url)
    files = tls.of(user)
    if parts.scheme != "rediss":
        return url
    query = dict(parse_qsl(parts.query))
    if tls.redis_ca:
        query.setdefault("ssl_ca_certs", tls.redis_ca)
    if files is not None:
        query.setdefault("ssl_ca_certs", str(files.authority))
        if "ssl_certfile" not in query and query["ssl_ca_certs"] == str(files.authority):
            query |= {"ssl_certfile": str(files.certificate), "ssl_keyfile": str(files.key)}
    return parts._replace(query=urlencode(query)).geturl()


async def check_redis(url: str, flag: str = "--redis-url") -> str:
    """Check that the operator's server answers. Raises ConfigError with the reason.

    Returns advice on the server's eviction policy. It is empty if the server evicts no keys.
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
    """Return the eviction policy of a Redis server. Without a memory limit it is ``noeviction``;
    None means unknown.

    Raises ``redis.RedisError``.
    """
    try:
        memory = await client.info("memory")
    except redis.ResponseError:
        # This user may not call INFO, or no user may, as on some managed servers.
        return None
    if memory.get("maxmemory") == 0:
        return "noeviction"
    policy = memory.get("maxmemory_policy")
    return None if policy is None else str(policy)


def eviction_advice(policy: str | None) -> str:
    """Return advice on a Redis server's eviction policy. Empty if the operator need not change
    it."""
    if policy == "noeviction":
        return ""
    if policy is None:
        return (
            "does not show whether it evicts keys (INFO is forbidden to this user): make sure "
            "that its maxmemory-policy is noeviction"
        )
    return (
        f"evicts keys when its memory is full (maxmemory-policy {policy}). Evicted workers and "
        "cached blocks are unknown until they are written again: CONFIG SET maxmemory-policy "
        "noeviction"
    )


def _without_password(url: str) -> str:
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    return parts._replace(netloc=f"***@{parts.netloc.rpartition('@')[2]}").geturl()
