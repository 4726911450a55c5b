"""What a cluster leaves in a real Valkey that is not its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio

from baton.request import Geometry
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry, WorkerRecord
from deploy.launcher.cluster_workers import forget_cluster
from deploy.processes.ports import free_port
from tests.support.mini_cluster import valkey

HASHES = [bytes([number]) * 16 for number in range(40)]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey() as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[redis.asyncio.Redis]:
    async with redis_client(url) as client:
        yield client
        await client.flushall()


async def join(client: redis.asyncio.Redis, cluster_id: str, slot: str) -> str:
    """A worker that is alive and holds blocks. Returns its incarnation."""
    record = WorkerRecord(
        incarnation=f"{slot}:1",
        slot=slot,
        role="decode",
        address="127.0.0.1:1",
        metrics_address="127.0.0.1:2",
        model="tiny",
        fingerprint="f" * 32,
        geometry=Geometry(16, 2, 3, 64, "bfloat16"),
        context_length=2048,
        total_blocks=100,
        max_sequences=8,
    )
    await Registry(client, cluster_id).put(record, 60.0)
    await PrefixIndex(client, cluster_id).snapshot(record.incarnation, HASHES)
    return record.incarnation


async def test_nothing_is_left_of_a_cluster_whose_workers_have_left(
    client: redis.asyncio.Redis,
) -> None:
    await client.set("an operator's key", "stays")
    for slot in ("prefill-0", "decode-0"):
        await Registry(client, "gone").remove(await join(client, "gone", slot))
    await join(client, "other", "decode-0")
    others = {key for key in await client.keys() if b"{gone}" not in key}
    assert len(others) < await client.dbsize()
    await forget_cluster(client, "gone")
    assert set(await client.keys()) == others


async def test_a_worker_that_lives_keeps_its_entries(client: redis.asyncio.Redis) -> None:
    alive = await join(client, "c", "decode-0")
    await Registry(client, "c").remove(await join(client, "c", "prefill-0"))
    await forget_cluster(client, "c")
    assert set(await Registry(client, "c").all()) == {alive}
    assert await Registry(client, "c").dead() == set()
    assert await PrefixIndex(client, "c").lookup(HASHES) == {alive: len(HASHES)}


async def test_a_server_that_has_gone_delays_no_end() -> None:
    async with redis_client(f"redis://127.0.0.1:{free_port()}/0") as client:
        await forget_cluster(client, "c")
