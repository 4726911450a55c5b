"""What a launcher does in a real Valkey that is not its own: what it leaves, and when it leads."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis.asyncio

from baton.config.cluster import Config
from baton.config.worker_fields import shared_hash
from baton.errors import ConfigError, Unavailable, WorkerFailed
from baton.host.background import end_tasks
from baton.request import Geometry
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry, WorkerRecord
from deploy.launcher import cluster_workers
from deploy.launcher.cluster_workers import ClusterWorkers, forget_cluster
from deploy.processes import leadership
from deploy.processes.leadership import LauncherLease, StaleOrderError
from deploy.processes.ports import free_port
from deploy.supervisor.supervisor_actor import SupervisorActor
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.ray_worker import SUPERVISOR_NAME
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
        await end_tasks([keeping])
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
    await client.set("baton:{c}:told", shared_hash(config))
    async with asyncio.timeout(60):
        await workers.lead()
        await workers.start()
        starting = asyncio.create_task(workers.start_supervisor())
        await asyncio.to_thread(ray.asked.wait, 60)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        ending = asyncio.create_task(workers.end(serves=True))
        await asyncio.sleep(0.1)
        ray.answers.set()
        await ending
        await workers.close()
    assert ended == ["supervisor", "decode-0"]


class Member:
    """Stands in for a worker that runs in a Ray cluster. It says with what it was started."""

    def __init__(self, ray: Members, slot: str, told: str | None) -> None:
        self._ray = ray
        self.slot = slot
        self.told = told
        self.refuses = False
        self.fails = False
        self.orders: list[str] = []

    async def shared_hash(self, deadline_s: float) -> str:
        if self.told is None:
            raise TimeoutError
        return self.told

    async def ready(self) -> dict[str, Any]:
        if self.fails:
            raise WorkerFailed("it does not start")
        return {"slot": self.slot, "process": {"pid": 18}}

    async def stop(self, *_: Any) -> None:
        self.orders.append("stop")
        if self.refuses:
            raise StaleOrderError("another one leads")

    def kill(self) -> None:
        self.orders.append("kill")
        del self._ray.workers[self.slot]


class Members(Ray):
    """Stands in for Ray: it knows a supervisor and workers. It may be slow to forget names."""

    def __init__(self) -> None:
        super().__init__()
        self.starts.set()
        self.workers: dict[str, Member] = {}
        self.forgets = True
        self.failure: Exception | None = None
        self.failing: set[str] = set()
        """Slots of workers that do not start."""

    def add(self, slot: str, told: str | None) -> Member:
        self.workers[slot] = Member(self, slot, told)
        return self.workers[slot]

    def place_worker(self, settings: ActorSettings, _: type) -> Member:
        worker = self.add(settings.slot, settings.shared_hash)
        worker.fails = settings.slot in self.failing
        return worker

    def all(self) -> list[Member]:
        if self.failure is not None:
            raise self.failure
        return list(self.workers.values())

    def knows(self, name: str) -> bool:
        if self.failure is not None:
            raise self.failure
        if name == SUPERVISOR_NAME:
            return self.there is not None or not self.forgets
        return name in self.workers


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Members:
    ray = Members()
    monkeypatch.setattr(cluster_workers, "RaySupervisor", ray)
    monkeypatch.setattr(cluster_workers, "find_all", ray.all)
    monkeypatch.setattr(cluster_workers, "find", ray.workers.get)
    monkeypatch.setattr(cluster_workers, "place", ray.place_worker)
    monkeypatch.setattr(cluster_workers, "is_known", ray.knows)
    for name in ("_GONE_S", "_POLL_S", "_LEAD_AGAIN_S", "_SUPERVISOR_AGAIN_S"):
        monkeypatch.setattr(cluster_workers, name, 0.02)
    for name in ("_POLL_S", "RENEW_S"):
        monkeypatch.setattr(leadership, name, 0.01)
    return ray


class OneLauncher:
    """A launcher's handle of the workers of a cluster, and what it prints."""

    def __init__(self, url: str, model: str = "old", slots: int = 1) -> None:
        self.config = Config(model=model, ray_address="127.0.0.1:1", cluster_id="c", redis_url=url)
        self.hash = shared_hash(self.config)
        self.told: asyncio.Queue[str] = asyncio.Queue()
        mine = {"shared_hash": self.hash}
        all_slots = [settings("decode", number).model_copy(update=mine) for number in range(slots)]
        tell = self.told.put_nowait
        self.workers = ClusterWorkers(self.config, all_slots, url, "c", SupervisorActor, tell)

    async def __aenter__(self) -> OneLauncher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.workers.close()

    async def until_told(self, text: str) -> None:
        async with asyncio.timeout(60):
            while text not in await self.told.get():
                pass


async def lose_the_lease(client: redis.asyncio.Redis, launcher: OneLauncher) -> None:
    """To a launcher that waited, and is gone at once."""
    await client.set(leadership.launcher_key("c"), "another", ex=600)
    await launcher.until_told("another launcher leads")
    await client.delete(leadership.launcher_key("c"))


@pytest.mark.parametrize("failure", [None, RuntimeError("the control store restarts"), OSError()])
async def test_a_launcher_that_leads_again_while_ray_is_slow_ends_no_worker(
    client: redis.asyncio.Redis, url: str, ray: Members, failure: Exception | None
) -> None:
    async with OneLauncher(url) as launcher:
        await launcher.workers.lead()
        await launcher.workers.start()
        await launcher.workers.start_supervisor()
        keeping = asyncio.create_task(launcher.workers.keep_leading())
        ray.forgets, ray.failure = failure is not None, failure
        await lose_the_lease(client, launcher)
        await launcher.until_told("does not lead yet, and tries again")
        assert await client.get(leadership.launcher_key("c")) is not None, "it keeps the lease"
        placed = ray.placed
        ray.forgets, ray.failure = True, None
        await launcher.until_told("leads the cluster again")
        async with asyncio.timeout(60):
            while ray.placed == placed:
                await asyncio.sleep(0.01)
        assert not keeping.done()
        assert [worker.orders for worker in ray.workers.values()] == [[]]
        await end_tasks([keeping])


async def test_a_takeover_that_was_interrupted_is_repeated_by_the_next_launcher(
    url: str, client: redis.asyncio.Redis, ray: Members
) -> None:
    async with OneLauncher(url) as old:
        await old.workers.lead()
        await old.workers.start()
        await old.workers.start_supervisor()
    (worker,) = ray.workers.values()
    ray.forgets = False
    async with OneLauncher(url, "new") as first:
        with pytest.raises(Unavailable, match="Ray still lists supervisor"):
            await first.workers.lead()
        # The launcher ends as after any start that fails: it leaves what it has not placed.
        await first.workers.end(serves=False)
    assert worker.orders == []
    ray.forgets = True
    async with OneLauncher(url, "new") as second:
        await second.workers.lead()
        assert worker.orders == ["stop", "kill"]
        await second.workers.start()
    # Now it is done, and recorded: the next launcher asks no worker.
    (worker,) = ray.workers.values()
    worker.told = None
    async with OneLauncher(url, "new") as third:
        await third.workers.lead()
    assert worker.orders == []


async def test_without_a_record_workers_say_whether_they_can_stay(
    url: str, client: redis.asyncio.Redis, ray: Members
) -> None:
    """Redis has lost its data while no launcher was there."""
    async with OneLauncher(url) as launcher:
        same = ray.add("decode-0", launcher.hash)
        other = ray.add("decode-1", "another")
        mute = ray.add("decode-2", None)
        await launcher.workers.lead()
    assert (same.orders, other.orders, mute.orders) == ([], ["stop", "kill"], ["stop", "kill"])
    assert set(ray.workers) == {"decode-0"}


async def test_a_launcher_that_leads_again_ends_no_workers_of_a_newer_configuration(
    client: redis.asyncio.Redis, url: str, ray: Members
) -> None:
    async with OneLauncher(url) as launcher:
        await launcher.workers.lead()
        keeping = asyncio.create_task(launcher.workers.keep_leading())
        newer = ray.add("decode-0", "newer")
        mute = ray.add("decode-1", None)
        ray.place()
        await client.set("baton:{c}:told", "newer")
        await lose_the_lease(client, launcher)
        async with asyncio.timeout(60):
            with pytest.raises(ConfigError, match="another configuration, with which decode-0 run"):
                await keeping
    assert (newer.orders, mute.orders) == ([], [])
    assert ray.there is not None, "their supervisor goes on"
    assert await client.get("baton:{c}:told") == b"newer"


async def test_a_start_that_fails_ends_only_what_it_has_placed(
    client: redis.asyncio.Redis, url: str, ray: Members
) -> None:
    async with OneLauncher(url, slots=2) as launcher:
        await client.set("baton:{c}:told", launcher.hash)
        serves = ray.add("decode-0", launcher.hash)
        ray.failing.add("decode-1")
        await launcher.workers.lead()
        with pytest.raises(ExceptionGroup):
            await launcher.workers.start()
        placed = ray.workers["decode-1"]
        await launcher.workers.end(serves=False)
    assert (serves.orders, placed.orders) == ([], ["stop", "kill"])
    assert await client.get("baton:{c}:told") is not None, "the cluster goes on"


async def test_a_worker_that_refuses_a_stale_order_is_not_killed(
    client: redis.asyncio.Redis, url: str, ray: Members
) -> None:
    """The launcher stood still, and another one has taken the cluster over."""
    async with OneLauncher(url) as launcher:
        await launcher.workers.lead()
        await launcher.workers.start()
        (worker,) = ray.workers.values()
        worker.refuses = True
        await launcher.workers.end(serves=True)
    assert worker.orders == ["stop"]
    worker.told = "another"
    async with OneLauncher(url, "new") as another:
        with pytest.raises(StaleOrderError):
            await another.workers.lead()
    assert worker.orders == ["stop", "stop"]
    assert await client.get("baton:{c}:told") is None, "its takeover is not done"


async def test_a_launcher_that_lost_its_lease_records_no_takeover(
    client: redis.asyncio.Redis, url: str
) -> None:
    lease = LauncherLease(client, "c", "first")
    await lease.take(lambda: None)
    await client.set(leadership.launcher_key("c"), "second", ex=600)
    assert not await lease.record_agreed("mine")
    assert await lease.agreed_hash() is None
