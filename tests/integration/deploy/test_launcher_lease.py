"""The lease of a cluster, and when other machines know that it has no owner."""

from __future__ import annotations

import asyncio
import secrets
from itertools import count
from types import SimpleNamespace

import pytest

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import BatonError
from baton.store.redis_client import redis_client
from deploy.processes import launcher_lease as lease_module
from deploy.processes.launcher_lease import (
    OF_LAUNCHERS,
    OF_ROUTERS,
    TTL_S,
    LauncherClaim,
    LauncherLease,
    lease_lost,
    workers_hash,
)


async def test_one_launcher_has_it_at_a_time(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = secrets.token_hex(4)
    async with redis_client(redis_url) as client:
        first, second = (LauncherLease(client, cluster, name) for name in ("a", "b"))
        await first.take()
        await first.take()
        clock = count(0.0, TTL_S)
        monkeypatch.setattr(
            lease_module,
            "time",
            SimpleNamespace(monotonic=lambda: next(clock)),
        )
        with pytest.raises(BatonError, match="another launcher has the cluster"):
            await second.take()
        await second.give_up()
        with pytest.raises(BatonError):
            await second.take()
        await first.give_up()
        await second.take()


async def test_a_lease_lasts_no_longer_where_the_clock_of_redis_is_set_back(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = secrets.token_hex(4)
    async with redis_client(redis_url) as client:
        await LauncherLease(client, cluster, "a").take()
        (key,) = await client.keys(f"*{cluster}*")
        await client.expire(key, 3600 + TTL_S)
        monkeypatch.setattr(lease_module, "TTL_S", 1)
        # No holder renews it: it is free after its TTL, and not in an hour.
        await LauncherLease(client, cluster, "b").take()
        assert await client.get(key) == b"b"


async def test_a_launcher_that_lost_it_ends(redis_url: str) -> None:
    cluster = secrets.token_hex(4)
    async with redis_client(redis_url) as client:
        first = LauncherLease(client, cluster, "a")
        await first.take()
        await first.give_up()
        await LauncherLease(client, cluster, "b").take()
        async with asyncio.timeout(60):
            with pytest.raises(BatonError, match="has taken the cluster"):
                await first.keep()


async def test_a_watcher_learns_that_it_is_free(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_module, "_POLL_S", 0.01)
    monkeypatch.setattr(lease_module, "GONE_S", 0.05)
    cluster = secrets.token_hex(4)
    async with redis_client(redis_url) as client, asyncio.timeout(60):
        lease = LauncherLease(client, cluster, "a")
        await lease.take()
        watching = asyncio.create_task(lease_lost(redis_url, cluster))
        await asyncio.sleep(0.2)
        assert not watching.done()
        await lease.give_up()
        await watching


async def test_a_claim_knows_whether_workers_have_the_same_settings(redis_url: str) -> None:
    cluster = secrets.token_hex(4)
    seen = []
    routers = Config(http="127.0.0.1:9", advanced={"head_deadline_s": 1.0})
    for config in (Config(), routers, Config(block_size=32), Config()):
        claim = LauncherClaim(config, redis_url, cluster)
        seen.append(await claim.take())
        await claim.give_up()
        await claim.close()
    assert seen == [False, False, True, True]


def test_fields_are_published_to_others() -> None:
    assert set(Config.model_fields) >= OF_ROUTERS | OF_LAUNCHERS


def test_workers_hash_has_their_pools_in_it() -> None:
    more = PoolConfig(name="decode", role="decode", max_sequences=8)
    pools = (Config().pools[0], more)
    assert workers_hash(Config(pools=pools)) != workers_hash(Config())
