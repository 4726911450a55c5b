"""The launchers' lease, the supervisor's term and the epochs of orders, in a real Valkey."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest
import redis.asyncio

from baton.store.redis_client import redis_client
from deploy.processes import leadership
from deploy.processes.leadership import (
    TTL_S,
    Fence,
    LauncherLease,
    StaleOrderError,
    SupervisorTerm,
    forget_leaders,
    launcher_key,
)

DEADLINE_S = 60.0


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leadership, "_POLL_S", 0.01)
    monkeypatch.setattr(leadership, "RENEW_S", 0.01)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis_client(redis_url) as client, asyncio.timeout(DEADLINE_S):
        yield client


@pytest.fixture
def cluster() -> str:
    return secrets.token_hex(4)


class Standby:
    """A launcher that asks for the lease of another one."""

    def __init__(self, client: redis.asyncio.Redis, cluster: str) -> None:
        self.lease = LauncherLease(client, cluster, "standby")
        self.waits = asyncio.Event()
        self.takes = asyncio.create_task(self.lease.take(self.waits.set))


def never() -> None:
    raise AssertionError("the lease is free")


async def test_one_launcher_leads_and_the_other_waits(
    client: redis.asyncio.Redis, cluster: str
) -> None:
    first = LauncherLease(client, cluster, "first")
    await first.take(never)
    await first.take(never)
    standby = Standby(client, cluster)
    await standby.waits.wait()
    assert await standby.lease.order_epoch() is None
    await standby.lease.give_up()
    assert await first.order_epoch() is not None
    assert not standby.takes.done()
    await first.give_up()
    await standby.takes
    assert await first.order_epoch() is None
    assert await standby.lease.order_epoch() is not None


async def test_a_lease_lasts_no_longer_where_the_clock_of_redis_is_set_back(
    client: redis.asyncio.Redis, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await LauncherLease(client, cluster, "first").take(never)
    await client.expire(launcher_key(cluster), 3600 + TTL_S)
    monkeypatch.setattr(leadership, "TTL_S", 1)
    # No holder renews it: it is free after its TTL, and not in an hour.
    await Standby(client, cluster).takes
    assert await client.get(launcher_key(cluster)) == b"standby"


async def test_a_leader_that_is_deposed_learns_it_and_may_lead_again(
    client: redis.asyncio.Redis, cluster: str
) -> None:
    first = LauncherLease(client, cluster, "first")
    await first.take(never)
    keeping = asyncio.create_task(first.keep())
    # A failover may lose the key, and another launcher is faster than the renewal.
    await client.set(launcher_key(cluster), "another", ex=TTL_S)
    await keeping
    again = asyncio.create_task(first.take(lambda: None))
    await client.delete(launcher_key(cluster))
    await again
    assert await first.order_epoch() is not None


async def test_waiting_survives_a_store_that_is_away(
    client: redis.asyncio.Redis, cluster: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await LauncherLease(client, cluster, "first").take(never)
    standby = Standby(client, cluster)
    await standby.waits.wait()
    known, failures = client.eval, asyncio.Event()

    async def away(*_: object) -> None:
        failures.set()
        raise redis.ConnectionError

    monkeypatch.setattr(client, "eval", away)
    await failures.wait()
    monkeypatch.setattr(client, "eval", known)
    await client.delete(launcher_key(cluster))
    await standby.takes


async def test_epochs_grow_from_leader_to_leader_even_if_the_store_loses_them(
    client: redis.asyncio.Redis, cluster: str
) -> None:
    lease = LauncherLease(client, cluster, "first")
    await lease.take(never)
    term = SupervisorTerm(client, cluster)
    await term.begin()
    ordered = await lease.order_epoch()
    assert ordered is not None
    assert ordered > term.epoch > 0
    await forget_leaders(client, cluster)
    await lease.take(never)
    # The clock of the store has a resolution of a second.
    await asyncio.sleep(1.1)
    later = await lease.order_epoch()
    assert later is not None
    assert later >= ordered


async def test_a_supervisor_is_deposed_by_the_next_one(
    client: redis.asyncio.Redis, cluster: str
) -> None:
    old, new = SupervisorTerm(client, cluster), SupervisorTerm(client, cluster)
    await old.begin()
    assert not await old.is_over()
    await new.begin()
    assert await old.is_over()
    assert not await old.rise_above(new.epoch)
    assert not await new.is_over()
    assert old.epoch < new.epoch


async def test_the_supervisor_rises_above_an_epoch_that_the_store_has_lost(
    client: redis.asyncio.Redis, cluster: str
) -> None:
    term = SupervisorTerm(client, cluster)
    await term.begin()
    seen = term.epoch + 1_000_000
    assert await term.rise_above(seen)
    assert term.epoch > seen
    await forget_leaders(client, cluster)
    assert not await term.is_over()
    assert await term.rise_above(term.epoch)


def test_a_worker_refuses_the_order_of_a_leader_that_was_replaced() -> None:
    fence = Fence()
    fence.check(5)
    fence.check(5)
    assert fence.see(7) == 7
    assert fence.see(6) == 7
    with pytest.raises(StaleOrderError, match="epoch 6 is refused: epoch 7 has begun"):
        fence.check(6)
    fence.check(8)
