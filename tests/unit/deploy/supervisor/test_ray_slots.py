"""What is seen of workers that answer as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import OutOfMemoryError

from baton.errors import BatonError, WorkerFailed
from deploy.processes.leadership import SupervisorTerm
from deploy.processes.run_directory import RunDirectory
from deploy.supervisor import ray_slots as ray_slots_module
from deploy.supervisor.death import DeathCause
from deploy.supervisor.death_evidence import DeathEvidence
from deploy.supervisor.ray_slots import RaySlots
from deploy.supervisor.reconciler import Observed
from deploy.workers.worker_actor import PingReply

DEADLINE_S = 60.0

EPOCH = 7


class FakeWorker:
    """Answers at once."""

    def __init__(self, slot: str) -> None:
        self.slot = slot
        self.answer = PingReply.SERVING
        self.unlisted: list[float] = []
        self.drained: list[tuple[float, int]] = []
        self.stuck = False
        self.highest_epoch = 0
        self.config_hash: str | None = "new"
        self.failure: Exception | None = None
        self.placed = asyncio.Event()
        self.placed.set()
        self.progress: int | None = None

    def waits_for_node(self) -> bool:
        return not self.placed.is_set()

    async def ready(self) -> dict[str, Any] | int:
        await self.placed.wait()
        if self.progress is not None:
            return self.progress
        if self.failure is not None:
            raise self.failure
        process = {"pid": 7, "start_ticks": 1, "space": "elsewhere"}
        hashes = {} if self.config_hash is None else {"config_hash": self.config_hash}
        return {"process": process, "node": "ab", "other_ranks": [], **hashes}

    async def ping(self, unlisted_s: float, epoch: int) -> tuple[PingReply, int]:
        if self.stuck:
            await asyncio.Future()
        self.unlisted.append(unlisted_s)
        self.highest_epoch = max(self.highest_epoch, epoch)
        return self.answer, self.highest_epoch

    async def drain(self, deadline_s: float, epoch: int) -> None:
        self.drained.append((deadline_s, epoch))


class Scene:
    """Two slots, with a clock and a registry of the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.listed: Collection[str] | None = ("decode-0", "decode-1")
        self.known: Collection[str] | None = ("decode-0", "decode-1")
        self.frozen: Collection[str] = ()
        self.workers = [FakeWorker("decode-0"), FakeWorker("decode-1")]

    async def roll(self) -> Mapping[str, Hashable] | None:
        """Entries that are renewed with each look, except those of ``frozen``."""
        if self.listed is None:
            return None
        return {slot: 0 if slot in self.frozen else object() for slot in self.listed}

    def is_known(self, slot: str) -> bool:
        """What Ray's control store says."""
        if self.known is None:
            raise ConnectionError("away")
        return slot in self.known

    async def until(self, slots: RaySlots, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                await slots.observe("decode-0")
                await asyncio.sleep(0)

    async def pass_time(self, slots: RaySlots, seconds: int) -> float:
        """The worker is asked once a second; returns its last answer."""
        for _ in range(seconds):
            self.now += 1.0
            await slots.refresh()
        count = len(self.workers[0].unlisted)
        await self.until(slots, lambda: len(self.workers[0].unlisted) >= count + 2)
        return self.workers[0].unlisted[-1]


@asynccontextmanager
async def begun(
    monkeypatch: pytest.MonkeyPatch,
    registry_ttl_s: float = 4.0,
    config_hash: str | None = "new",
    scene: Scene | None = None,
) -> AsyncIterator[tuple[Scene, RaySlots]]:
    """``config_hash`` is that of the worker in decode-1; new workers have "new"."""
    scene = scene or Scene()
    scene.workers[1].config_hash = config_hash
    monkeypatch.setattr(ray_slots_module, "find_all", lambda: scene.workers)
    monkeypatch.setattr(ray_slots_module, "is_known", scene.is_known)
    monkeypatch.setattr(ray_slots_module, "time", SimpleNamespace(monotonic=lambda: scene.now))
    slots = RaySlots(
        lambda _: pytest.fail("nobody is started"),
        scene.roll,
        registry_ttl_s,
        cast(SupervisorTerm, SimpleNamespace(epoch=EPOCH)),
        DeathEvidence(RunDirectory(Path("/nowhere")), one_machine=False),
        config_hash="new",
    )
    await slots.find_running()
    try:
        if scene.workers[0].failure is None and scene.workers[0].placed.is_set():
            await scene.until(slots, lambda: bool(scene.workers[0].unlisted))
        yield scene, slots
    finally:
        slots.close()


async def test_a_worker_learns_how_long_only_others_were_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with begun(monkeypatch) as (scene, slots):
        assert set(slots.names) == {"decode-0", "decode-1"}
        assert await scene.pass_time(slots, 5) == 0
        scene.listed = ("decode-1",)
        assert await scene.pass_time(slots, 40) == 40
        assert (await slots.observe("decode-0")).observed is Observed.SERVING
        scene.listed = ("decode-0",)
        assert await scene.pass_time(slots, 1) == 0


@pytest.mark.parametrize("listed", [None, ()])
async def test_an_unreachable_or_empty_registry_marks_no_worker_dead(
    monkeypatch: pytest.MonkeyPatch, listed: tuple[str, ...] | None
) -> None:
    async with begun(monkeypatch) as (scene, slots):
        scene.listed = listed
        assert await scene.pass_time(slots, 500) == 0


async def test_a_supervisor_that_was_stopped_marks_no_worker_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with begun(monkeypatch) as (scene, slots):
        scene.now += 500.0
        scene.listed = ("decode-1",)
        assert await scene.pass_time(slots, 1) < 10


async def test_a_running_worker_whose_first_answer_ray_loses_serves_by_the_registry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another supervisor has started it: it must not end as one that does not start."""
    scene = Scene()
    for worker in scene.workers:
        worker.failure = RuntimeError("Ray is slow")
    async with begun(monkeypatch, scene=scene) as (_, slots):
        for listed, seen in (
            (("decode-0", "decode-1"), Observed.SERVING),
            (None, Observed.SERVING),
            (("decode-1",), Observed.STARTING),
        ):
            scene.listed = listed
            scene.now += 1000.0
            await slots.refresh()
            for _ in range(3):
                assert (await slots.observe("decode-0")).observed is seen
                await asyncio.sleep(0)
        scene.workers[0].failure = None
        await scene.until(slots, lambda: bool(scene.workers[0].unlisted))


async def test_a_leaving_worker_is_noticed_and_drained(monkeypatch: pytest.MonkeyPatch) -> None:
    async with begun(monkeypatch) as (scene, slots):
        await slots.drain("decode-0", 3.0)
        await slots.drain("decode-9", 3.0)
        assert scene.workers[0].drained == [(3.0, EPOCH)]
        scene.workers[0].answer = PingReply.LEAVING
        await scene.pass_time(slots, 1)
        assert (await slots.observe("decode-0")).observed is Observed.LEAVING


async def _looks(scene: Scene, slots: RaySlots, seconds: int) -> None:
    """At decode-0, which does not answer; Ray has time to."""
    for _ in range(seconds):
        scene.now += 1.0
        await slots.observe("decode-0")
        await asyncio.sleep(0.01)


async def test_a_death_that_ray_knows_and_does_not_tell_makes_this_process_useless(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with begun(monkeypatch) as (scene, slots):
        scene.workers[0].stuck = True
        scene.known = ("decode-1",)
        # Ray may be about to tell.
        await _looks(scene, slots, 8)
        with pytest.raises(BatonError, match="Ray reports decode-0 dead but sent no notification"):
            await _looks(scene, slots, 8)


@pytest.mark.parametrize("known", [("decode-0", "decode-1"), None])
async def test_a_worker_that_is_silent_while_ray_thinks_it_lives_is_no_sign_of_that(
    monkeypatch: pytest.MonkeyPatch, known: tuple[str, ...] | None
) -> None:
    async with begun(monkeypatch) as (scene, slots):
        scene.workers[0].stuck = True
        scene.known = known
        scene.listed = ("decode-1",)
        await slots.refresh()
        await _looks(scene, slots, 60)
        assert (await slots.observe("decode-0")).observed is Observed.SILENT


async def test_an_entry_that_is_not_renewed_lists_no_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Redis keeps it for as long as its clock was set back."""
    async with begun(monkeypatch) as (scene, slots):
        scene.workers[0].stuck = True
        await _looks(scene, slots, 8)
        await slots.refresh()
        assert (await slots.observe("decode-0")).observed is Observed.SERVING, "the registry has it"
        scene.frozen = ("decode-0",)
        for _ in range(24):
            scene.now += 0.5
            await slots.refresh()
        assert (await slots.observe("decode-0")).observed is Observed.SILENT
        scene.frozen = ()
        await slots.refresh()
        assert (await slots.observe("decode-0")).observed is Observed.SERVING


async def test_workers_that_renew_their_entries_seldom_are_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A heartbeat of 10 s, and entries that live for 30 s."""
    async with begun(monkeypatch, registry_ttl_s=30.0) as (scene, slots):
        for _ in range(20):
            scene.frozen = ()
            assert await scene.pass_time(slots, 1) == 0
            scene.frozen = ("decode-0",)
            assert await scene.pass_time(slots, 9) == 0


async def test_the_highest_epoch_of_all_workers_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async with begun(monkeypatch) as (scene, slots):
        await scene.until(slots, lambda: slots.highest_epoch == EPOCH)
        scene.workers[0].highest_epoch = EPOCH + 2
        await scene.until(slots, lambda: slots.highest_epoch == EPOCH + 2)


@pytest.mark.parametrize("config_hash", ["old", "", None])
async def test_a_worker_of_another_hash_is_outdated(
    monkeypatch: pytest.MonkeyPatch, config_hash: str | None
) -> None:
    """A worker of Baton 0.1.0 tells no hash."""
    async with begun(monkeypatch, config_hash=config_hash) as (_, slots):
        assert not (await slots.observe("decode-0")).outdated
        async with asyncio.timeout(DEADLINE_S):
            while (seen := await slots.observe("decode-1")).observed is not Observed.SERVING:
                await asyncio.sleep(0)
        assert seen.outdated


@pytest.mark.parametrize("starts", [True, False])
async def test_a_worker_that_rays_memory_monitor_has_ended_is_dead(
    monkeypatch: pytest.MonkeyPatch, starts: bool
) -> None:
    scene = Scene()
    ended: Exception = OutOfMemoryError("was 9GB used / 9GB limit")  # type: ignore[no-untyped-call]
    if starts:
        ended, cause = WorkerFailed("worker decode-0: it has ended"), ended
        ended.__cause__ = cause
        scene.workers[0].failure = ended
    async with begun(monkeypatch, scene=scene) as (_, slots):
        monkeypatch.setattr(scene.workers[0], "kill", lambda: None, raising=False)
        monkeypatch.setattr(slots, "_clear", nothing)
        if not starts:
            monkeypatch.setattr(scene.workers[0], "ping", raising(ended))
        async with asyncio.timeout(DEADLINE_S):
            while (seen := await slots.observe("decode-0")).observed is not Observed.ABSENT:
                await asyncio.sleep(0)
    assert seen.cause is DeathCause.RAY_MEMORY_MONITOR
    assert "killed by Ray's memory monitor" in seen.error
    assert "9GB used / 9GB limit" in seen.error


async def nothing(*_: object) -> None:
    """Of a worker that Ray does not have nothing is left."""


def raising(error: Exception) -> Callable[..., Any]:
    async def ping(unlisted_s: float, epoch: int) -> None:
        raise error

    return ping


@pytest.mark.parametrize("known", [True, False])
async def test_a_worker_that_died_without_a_supervisor_is_explained_once(
    monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    def death_of(slot: str, pid: int) -> Exception:
        assert (slot, pid) == ("decode-5", 9)
        if not known:
            raise ConnectionError("away")
        return OutOfMemoryError("was 9GB used / 9GB limit")  # type: ignore[no-untyped-call]

    monkeypatch.setattr(ray_slots_module, "death_of", death_of)
    async with begun(monkeypatch) as (_, slots):
        await slots.find_missed("decode-5", 9)
        seen = await slots.observe("decode-5")
        assert seen.observed is Observed.ABSENT
        assert seen.cause is (DeathCause.RAY_MEMORY_MONITOR if known else DeathCause.UNKNOWN)
        assert seen.error
        assert not (await slots.observe("decode-5")).error


async def test_a_worker_without_a_node_waits_and_one_that_reads_on_tells_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scene = Scene()
    worker = scene.workers[0]
    worker.placed.clear()
    async with begun(monkeypatch, scene=scene) as (_, slots):

        async def seen(observed: Observed, progress: int) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    found = await slots.observe("decode-0")
                    if (found.observed, found.progress) == (observed, progress):
                        return
                    await asyncio.sleep(0)

        scene.listed = ()
        await slots.refresh()
        await seen(Observed.STARTING, 0)
        scene.now += 10.0
        await seen(Observed.UNPLACED, 0)
        # Ray has a node, and the call that waits is answered soon.
        worker.progress = 7
        worker.placed.set()
        await seen(Observed.STARTING, 7)
        worker.progress = None
        scene.listed = ("decode-0",)
        await seen(Observed.SERVING, 0)
