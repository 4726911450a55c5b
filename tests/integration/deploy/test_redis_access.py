"""Checks of a Redis that the operator names."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import redis

from baton.config.cluster import Config
from baton.errors import ConfigError
from deploy.doctor.doctor import Finding, examine
from deploy.doctor.doctor_host import host_checks
from deploy.launcher.preflight import preflight
from deploy.store.redis_access import check_redis
from tests.support.mini_cluster import free_port, valkey

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def own_url() -> Iterator[str]:
    """A Valkey whose settings these tests may change."""
    with valkey() as url:
        yield url


@pytest.fixture
def admin(own_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(own_url) as client:
        yield client
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", 0)


def look(url: str) -> Finding:
    (found,) = examine(one for one in host_checks(Config(redis_url=url)) if one.what == "Redis")
    return found


async def test_it_answers(own_url: str, admin: redis.Redis) -> None:
    assert await check_redis(own_url) == ""
    with pytest.raises(ConfigError, match="--redis-url redis://127"):
        await check_redis(f"redis://127.0.0.1:{free_port()}/0")
    admin.acl_setuser("ann", enabled=True, passwords=["+right"], commands=["+ping"])
    with pytest.raises(ConfigError) as failure:
        await check_redis(own_url.replace("//", "//ann:hunter2@"))
    assert "hunter2" not in str(failure.value)
    with pytest.raises(ConfigError, match="--redis-url"):
        await check_redis("localhost:6379")


@pytest.mark.parametrize("policy", ["volatile-ttl", "volatile-lru", "allkeys-lru"])
async def test_it_is_to_evict_nothing(own_url: str, admin: redis.Redis, policy: str) -> None:
    """Every key of Baton has a TTL: what evicts those alone evicts all of it."""
    admin.config_set("maxmemory-policy", policy)
    assert await check_redis(own_url) == "", "its memory is never full"
    assert (await asyncio.to_thread(look, own_url)).usable
    admin.config_set("maxmemory", "100mb")
    advice = await check_redis(own_url, "--gcs-store")
    assert advice.startswith(f"--gcs-store {own_url} evicts keys")
    assert policy in advice
    assert advice.endswith("CONFIG SET maxmemory-policy noeviction")
    found = await asyncio.to_thread(look, own_url)
    assert not found.usable
    assert policy in found.detail
    admin.config_set("maxmemory-policy", "noeviction")
    assert await check_redis(own_url) == ""


async def test_a_start_advises_the_operator(own_url: str, admin: redis.Redis) -> None:
    admin.config_set("maxmemory-policy", "volatile-ttl")
    admin.config_set("maxmemory", "100mb")
    config = Config(redis_url=own_url, http="127.0.0.1:0", grpc="127.0.0.1:0")
    (advice,) = (await preflight(config)).advice
    assert "CONFIG SET maxmemory-policy noeviction" in advice


async def test_it_may_not_say(own_url: str, admin: redis.Redis) -> None:
    admin.acl_setuser("bob", enabled=True, passwords=["+secret"], commands=["+ping"])
    url = own_url.replace("//", "//bob:secret@")
    advice = await check_redis(url)
    assert "make sure that its maxmemory-policy is noeviction" in advice
    assert "secret" not in advice
    found = await asyncio.to_thread(look, url)
    assert found.usable, "perhaps it is well"
    assert "make sure" in found.detail


async def test_a_server_that_accepts_and_says_nothing_fails_in_time() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, asyncio.timeout(DEADLINE_S):
        with pytest.raises(ConfigError, match="--redis-url"):
            await check_redis(f"redis://127.0.0.1:{port}/0")
