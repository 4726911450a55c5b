"""The supervisor's loop over workers that are a dictionary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from typing import cast

import pytest
import redis
from prometheus_client import CollectorRegistry

from baton.errors import BatonError
from baton.host.background import end_tasks
from baton.store.supervision import PoolSizes, ScalingDecision
from baton.telemetry.metrics import SupervisorMetrics
from deploy.processes.leadership import SupervisorTerm
from deploy.supervisor import supervisor as supervisor_module
from deploy.supervisor.death import DeathCause
from deploy.supervisor.ray_slots import RaySlots, SlotObservation
from deploy.supervisor.reconciler import Observed, Phase, Reconciler, SlotState
from deploy.supervisor.status_store import SlotStatus, StatusStore, SupervisionStatus
from deploy.supervisor.supervisor import Supervisor

DEADLINE_S = 60.0
DRAIN_S = 7.0
POOLS = {"decode": 2}
SLOTS = ("decode-0", "decode-1")


class FakeWorkers:
    """Started workers serve at once."""

    def __init__(self, **living: SlotObservation) -> None:
        self.seen = {slot.replace("_", "-"): seen for slot, seen in living.items()}
        self.recalls = 0
        self.died = asyncio.Event()
        self.refreshed = 0
        self.started: list[str] = []
        self.drained: list[tuple[str, float]] = []
        self.ended: list[str] = []
        self.failure: Exception | None = None
        self.highest_epoch = 0
        self.closed = False
        self.missed: list[tuple[str, int]] = []

    async def find_missed(self, slot: str, pid: int) -> None:
        self.missed.append((slot, pid))
        self.seen[slot] = SlotObservation(Observed.ABSENT, "no memory", DeathCause.OUT_OF_MEMORY)

    async def find_running(self) -> None:
        self.recalls += 1
        if self.recalls == 1 and self.failure is not None:
            raise self.failure

    @property
    def names(self) -> Collection[str]:
        return [slot for slot, seen in self.seen.items() if seen.observed is not Observed.ABSENT]

    async def refresh(self) -> None:
        self.refreshed += 1

    async def observe(self, slot: str) -> SlotObservation:
        return self.seen.get(slot, SlotObservation(Observed.ABSENT))

    async def start(self, slot: str) -> None:
        self.started.append(slot)
        if self.failure is not None:
            raise self.failure
        self.seen[slot] = SlotObservation(Observed.SERVING, pid=len(self.started), node="here")

    async def drain(self, slot: str, deadline_s: float) -> None:
        self.drained.append((slot, deadline_s))
        self.seen[slot] = SlotObservation(Observed.LEAVING)

    async def end(self, slot: str) -> None:
        self.ended.append(slot)

    async def death(self) -> None:
        await self.died.wait()
        self.died.clear()

    def close(self) -> None:
        self.closed = True


class FakeBoard:
    """Records what is published, as long as it can be reached."""

    def __init__(self, told: SupervisionStatus | None = None) -> None:
        self.told = told
        self.away = False

    async def write(self, supervision: SupervisionStatus) -> None:
        if self.away:
            raise redis.ConnectionError
        self.told = supervision

    async def read(self) -> SupervisionStatus | None:
        if self.away:
            raise redis.ConnectionError
        return self.told


class FakeSizes:
    """Keeps what is chosen, as long as it can be reached."""

    def __init__(self, **sizes: int) -> None:
        self.sizes = sizes
        self.away = False

    async def read(self) -> dict[str, int]:
        if self.away:
            raise redis.ConnectionError
        return dict(self.sizes)

    async def restore(self, pool: str, count: int) -> None:
        self.sizes.setdefault(pool, count)


class FakeTerm:
    """A term whose end the test decides, as long as the store can be reached."""

    def __init__(self) -> None:
        self.epoch = 0
        self.away = False
        self.over = False

    async def begin(self) -> None:
        self._ask()
        self.epoch = 5

    async def is_over(self) -> bool:
        self._ask()
        return self.over

    async def rise_above(self, epoch: int) -> bool:
        self._ask()
        self.epoch = self.epoch if self.over else epoch + 1
        return not self.over

    def _ask(self) -> None:
        if self.away:
            raise redis.ConnectionError


class Play:
    """A supervisor that runs until the test ends."""

    def __init__(
        self,
        workers: FakeWorkers,
        board: FakeBoard,
        sizes: FakeSizes | None = None,
        term: FakeTerm | None = None,
    ) -> None:
        self.workers, self.board, self.sizes = workers, board, sizes or FakeSizes()
        self.metrics = SupervisorMetrics(CollectorRegistry())
        self.reconciler = Reconciler(DRAIN_S, 600.0)
        self.note = ""
        self.decisions: tuple[ScalingDecision, ...] = ()
        self.term = term or FakeTerm()
        self.supervisor = supervisor = Supervisor(
            POOLS,
            self.reconciler,
            cast(RaySlots, workers),
            cast(StatusStore, board),
            cast(PoolSizes, self.sizes),
            cast(SupervisorTerm, self.term),
            self.metrics,
            "here:1",
            drain_s=DRAIN_S,
            note=lambda: self.note,
            decisions=lambda: self.decisions,
        )
        self.task = asyncio.create_task(supervisor.run())

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.001)

    def phase(self, slot: str) -> Phase | None:
        told = self.board.told
        return None if told is None or slot not in told.slots else told.slots[slot].state.phase

    async def end(self) -> None:
        await end_tasks([self.task])
        assert self.workers.closed


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor_module, "LOOK_S", 0.001)
    monkeypatch.setattr(supervisor_module, "_FIND_AGAIN_S", 0.001)


async def test_it_fills_what_is_empty_leaves_who_serves_and_tells() -> None:
    play = Play(
        FakeWorkers(decode_0=SlotObservation(Observed.SERVING, pid=77, node="here")), FakeBoard()
    )
    await play.until(lambda: play.phase("decode-1") is Phase.RUNNING)
    assert play.workers.started == ["decode-1"]
    assert play.board.told is not None
    assert play.board.told.slots["decode-0"] == SlotStatus(SlotState(Phase.RUNNING), 77, "here")
    value = play.metrics.registry.get_sample_value
    labels = {"worker": "decode-0", "pool": "decode"}
    assert value("baton_worker_slot_state", labels | {"state": "running"}) == 1
    assert value("baton_worker_slot_state", labels | {"state": "crash loop"}) == 0
    killed = SlotObservation(Observed.ABSENT, "killed", DeathCause.SIGKILL)
    play.workers.seen["decode-0"] = killed
    await play.until(lambda: play.workers.started == ["decode-1", "decode-0"])
    await play.until(lambda: play.phase("decode-0") is Phase.RUNNING)
    assert play.board.told.slots["decode-0"].state.last_error == "killed"
    died = {"worker": "decode-0", "cause": "sigkill"}
    assert value("baton_worker_deaths_total", died) == 1
    await play.end()


async def test_what_an_earlier_one_told_is_remembered() -> None:
    known = SlotStatus(SlotState(Phase.CRASH_LOOP, 7, "no memory"))
    earlier = SupervisionStatus(1, "", {"decode-0": known, "long-gone-0": known})
    play = Play(FakeWorkers(), FakeBoard(earlier))
    await play.until(lambda: play.board.told is not earlier)
    assert play.board.told is not None
    assert play.board.told.slots["decode-0"].state.deaths == 7
    assert "long-gone-0" not in play.board.told.slots
    await play.end()


async def test_a_worker_that_died_with_the_last_supervisor_is_a_death_not_one_that_left() -> None:
    ran = SlotStatus(SlotState(Phase.RUNNING, 1, "killed"), pid=7)
    left = SlotStatus(SlotState(Phase.DRAINING), pid=8)
    play = Play(
        FakeWorkers(), FakeBoard(SupervisionStatus(1, "", {"decode-0": ran, "decode-1": left}))
    )
    await play.until(lambda: set(play.workers.started) == set(SLOTS))
    assert play.workers.missed == [("decode-0", 7)]
    value = play.metrics.registry.get_sample_value
    died = {"worker": "decode-0", "cause": "out_of_memory"}
    assert value("baton_worker_deaths_total", died) == 1
    states = play.reconciler.states(time.monotonic())
    assert (states["decode-0"].deaths, states["decode-0"].last_error) == (2, "no memory")
    assert states["decode-1"].deaths == 0
    await play.end()


async def test_without_ray_and_without_redis_it_goes_on_trying_and_blames_no_worker() -> None:
    workers, board = FakeWorkers(), FakeBoard()
    workers.failure, board.away = ConnectionError("Ray is away\nfor a while"), True
    play = Play(workers, board)
    await play.until(lambda: set(workers.started) == set(SLOTS))
    assert workers.recalls == 2
    board.away = False
    await play.until(lambda: board.told is not None)
    await play.until(lambda: bool(board.told and board.told.slots["decode-0"].state.last_error))
    assert board.told is not None
    state = board.told.slots["decode-0"].state
    assert (state.phase, state.deaths) == (Phase.STARTING, 0)
    assert state.last_error == "Ray: Ray is away"
    await play.end()


def state_of(play: Play, slot: str) -> float | None:
    labels = {"worker": slot, "pool": "decode", "state": "running"}
    return play.metrics.registry.get_sample_value("baton_worker_slot_state", labels)


async def test_a_pool_grows_and_shrinks_by_the_newest_without_deaths() -> None:
    play = Play(FakeWorkers(), FakeBoard())
    await play.until(lambda: play.phase("decode-1") is Phase.RUNNING)
    play.sizes.sizes["decode"] = 4
    await play.until(lambda: play.phase("decode-3") is Phase.RUNNING)
    assert sorted(play.workers.started) == ["decode-0", "decode-1", "decode-2", "decode-3"]
    assert state_of(play, "decode-3") == 1
    play.sizes.sizes["decode"] = 1
    await play.until(lambda: len(play.workers.drained) == 3)
    assert sorted(play.workers.drained) == [(f"decode-{n}", DRAIN_S) for n in (1, 2, 3)]
    assert play.phase("decode-3") is Phase.LEAVING
    for slot in ("decode-1", "decode-2", "decode-3"):
        play.workers.seen[slot] = SlotObservation(Observed.ABSENT, "it ended")
    await play.until(lambda: play.board.told is not None and len(play.board.told.slots) == 1)
    assert state_of(play, "decode-3") is None
    value = play.metrics.registry.get_sample_value
    assert value("baton_worker_deaths_total", {"worker": "decode-3", "cause": "unknown"}) is None
    assert len(play.workers.started) == 4
    await play.end()


async def test_a_drained_worker_is_followed_by_another_one_and_is_no_death() -> None:
    play = Play(FakeWorkers(), FakeBoard())
    await play.until(lambda: play.phase("decode-1") is Phase.RUNNING)
    play.workers.seen["decode-1"] = SlotObservation(Observed.LEAVING)
    await play.until(lambda: play.phase("decode-1") is Phase.DRAINING)
    play.workers.seen["decode-1"] = SlotObservation(Observed.ABSENT, "it ended")
    await play.until(lambda: play.workers.started.count("decode-1") == 2)
    await play.until(lambda: play.phase("decode-1") is Phase.RUNNING)
    assert play.board.told is not None
    assert play.board.told.slots["decode-1"].state.deaths == 0
    await play.end()


async def test_a_chosen_size_outlives_the_supervisor_and_the_store() -> None:
    grown = {f"decode_{n}": SlotObservation(Observed.SERVING, pid=n, node="here") for n in range(3)}
    sizes = FakeSizes()
    sizes.away = True
    play = Play(FakeWorkers(**grown), FakeBoard(), sizes)
    await play.until(lambda: play.phase("decode-2") is Phase.RUNNING)
    # The store is back, and empty: what had been chosen is written there again.
    sizes.away = False
    await play.until(lambda: sizes.sizes == {"decode": 3})
    assert play.workers.drained == []
    await play.end()
    again = Play(FakeWorkers(**grown), FakeBoard(), FakeSizes(decode=1))
    await again.until(lambda: len(again.workers.drained) == 2)
    await again.end()


async def test_its_slots_and_the_autoscalers_note_are_shown() -> None:
    play = Play(
        FakeWorkers(decode_0=SlotObservation(Observed.SERVING, pid=77, node="here")), FakeBoard()
    )
    await play.until(lambda: play.phase("decode-1") is Phase.RUNNING)
    assert play.reconciler.phases(time.monotonic()) == {
        "decode-0": Phase.RUNNING,
        "decode-1": Phase.RUNNING,
    }
    assert play.board.told is not None
    assert play.board.told.autoscaler == ""
    play.note = "decode has 2 and needs 1.5"
    await play.until(lambda: bool(play.board.told and play.board.told.autoscaler))
    assert play.board.told.autoscaler == "decode has 2 and needs 1.5"
    decision = ScalingDecision(1.0, "decode gets a worker (slo: late)")
    play.decisions = (decision,)
    await play.until(lambda: bool(play.board.told and play.board.told.decisions))
    assert play.board.told.decisions == (decision,)
    await play.end()


async def test_a_death_that_is_heard_of_is_looked_at_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play(FakeWorkers(), FakeBoard())
    await play.until(lambda: play.phase("decode-0") is Phase.RUNNING)
    monkeypatch.setattr(supervisor_module, "LOOK_S", 3600.0)
    workers = play.workers
    # The look in progress, which rests for an hour now.
    looks = workers.refreshed
    await play.until(lambda: workers.refreshed >= looks)
    workers.seen["decode-0"] = SlotObservation(Observed.ABSENT, "it died")
    workers.died.set()
    # The pause before its next life ends that hour, too.
    await play.until(lambda: workers.seen["decode-0"].observed is Observed.SERVING)
    await play.end()


async def test_it_ends_when_another_supervisor_leads() -> None:
    play = Play(FakeWorkers(), FakeBoard())
    await play.until(lambda: len(play.workers.started) == len(SLOTS))
    play.term.over = True
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(BatonError, match="another supervisor leads"):
            await play.task
    assert play.workers.closed


async def test_it_rises_above_an_epoch_that_workers_have_seen() -> None:
    play = Play(FakeWorkers(), FakeBoard())
    play.workers.highest_epoch = 99
    await play.until(lambda: play.term.epoch == 100)
    await play.end()


async def test_while_redis_is_away_it_starts_workers_and_drains_none() -> None:
    term, sizes = FakeTerm(), FakeSizes(decode=1)
    term.away = True
    workers = FakeWorkers(
        decode_0=SlotObservation(Observed.SERVING), decode_1=SlotObservation(Observed.SERVING)
    )
    play = Play(workers, FakeBoard(), sizes, term)
    workers.seen["decode-0"] = SlotObservation(Observed.ABSENT, "killed")
    await play.until(lambda: workers.started == ["decode-0"])
    await play.until(
        lambda: (
            "another supervisor may lead"
            in play.reconciler.states(time.monotonic())["decode-1"].last_error
        )
    )
    assert workers.drained == []
    term.away = False
    await play.until(lambda: bool(workers.drained))
    await play.end()
