"""What a launcher does in a real Valkey that is not its own: what it leaves, and when it leads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis.asyncio

from baton.config.cluster import Config
from baton.request import Geometry
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry, WorkerRecord
from deploy.launcher import cluster_workers
from deploy.launcher.cluster_workers import ClusterWorkers, forget_cluster
from deploy.processes import leadership
from deploy.processes.ports import free_port
from deploy.supervisor.supervisor_actor import SupervisorActor
from tests.support.deploy.supervisor_actor import settings
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


class Ray:
    """Stands in for Ray: it knows the cluster's supervisor, which starts when ``starts`` is set."""

    def __init__(self) -> None:
        self.starts = asyncio.Event()
        self.placed = self.killed = 0
        self.there: Ray | None = None

    def place(self, *_: Any) -> Ray:
        self.placed += 1
        self.there = self
        return self

    def find(self) -> Ray | None:
        return self.there

    async def ready(self) -> int:
        await self.starts.wait()
        return 17

    def kill(self) -> None:
        self.killed += 1
        self.there = None


async def test_a_launcher_that_waits_leaves_the_supervisor_of_the_leader_alone(
    client: redis.asyncio.Redis, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ray, told = Ray(), asyncio.Queue[str]()
    monkeypatch.setattr(cluster_workers, "RaySupervisor", ray)
    monkeypatch.setattr(cluster_workers, "find_all", list)
    monkeypatch.setattr(cluster_workers, "is_known", lambda _: ray.there is not None)
    monkeypatch.setattr(cluster_workers, "_SUPERVISOR_START_S", 0.02)
    monkeypatch.setattr(cluster_workers, "_SUPERVISOR_AGAIN_S", 0.01)
    for name in ("_POLL_S", "RENEW_S"):
        monkeypatch.setattr(leadership, name, 0.01)
    config = Config(model="tiny", ray_address="127.0.0.1:1", cluster_id="c", redis_url=url)
    slots = [settings("decode", 0)]
    workers = ClusterWorkers(config, slots, url, "c", SupervisorActor, told.put_nowait)
    async with asyncio.timeout(60):
        await workers.lead()
        keeping = asyncio.create_task(workers.keep_leading())
        starting = asyncio.create_task(workers.start_supervisor())
        while ray.killed < 2:  # it does not start, and is placed again
            await asyncio.sleep(0.01)
        await client.set(leadership.launcher_key("c"), "another", ex=600)
        while "another launcher leads" not in await told.get():
            pass
        await asyncio.sleep(0.1)  # a placement that had begun ends
        before = ray.placed, ray.killed
        await asyncio.sleep(0.3)
        assert (ray.placed, ray.killed) == before
        assert not starting.done()
        ray.starts.set()
        await client.delete(leadership.launcher_key("c"))
        assert await starting == 17
        keeping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await keeping
        await workers.close()


class Worker:
    """Stands in for a worker that serves; notes when it is stopped."""

    slot = "decode-0"

    def __init__(self, ended: list[str]) -> None:
        self._ended = ended

    async def ready(self) -> dict[str, Any]:
        return {"slot": self.slot, "process": {"pid": 18}}

    async def stop(self, *_: Any) -> None:
        self._ended.append(self.slot)

    def kill(self) -> None:
        """It has stopped."""


class SlowRay(Ray):
    """It takes its time to place a supervisor; notes when that one is killed."""

    def __init__(self, ended: list[str]) -> None:
        super().__init__()
        self.asked, self.answers = threading.Event(), threading.Event()
        self._ended = ended

    def place(self, *_: Any) -> Ray:
        self.asked.set()
        assert self.answers.wait(60)
        return super().place()

    async def stop(self, *_: Any) -> None:
        """It is ignored: the supervisor has not started."""

    def kill(self) -> None:
        super().kill()
        self._ended.append("supervisor")


async def test_a_launcher_that_ends_while_it_places_the_supervisor_ends_that_before_the_workers(
    client: redis.asyncio.Redis, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would replace them."""
    ended: list[str] = []
    ray, worker = SlowRay(ended), Worker(ended)
    monkeypatch.setattr(cluster_workers, "RaySupervisor", ray)
    monkeypatch.setattr(cluster_workers, "find_all", lambda: [worker])
    monkeypatch.setattr(cluster_workers, "find", lambda _: worker)
    config = Config(model="tiny", ray_address="127.0.0.1:1", cluster_id="c", redis_url=url)
    slots = [settings("decode", 0)]
    workers = ClusterWorkers(config, slots, url, "c", SupervisorActor, lambda _: None)
    async with asyncio.timeout(60):
        await workers.lead()
        await workers.start()
        starting = asyncio.create_task(workers.start_supervisor())
        await asyncio.to_thread(ray.asked.wait, 60)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        ending = asyncio.create_task(workers.end())
        await asyncio.sleep(0.1)
        ray.answers.set()
        await ending
        await workers.close()
    assert ended == ["supervisor", "decode-0"]
