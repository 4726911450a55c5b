"""The autoscaler at work, over a cluster that is a list: it looks, decides, and has it done."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import grpc.aio
import pytest
import redis
from prometheus_client import CollectorRegistry

from baton.autoscaling.autoscaler import ChangeRole, Resize
from baton.autoscaling.cluster_figures import ClusterFigures, WorkerState
from baton.autoscaling.needs import Reason
from baton.autoscaling.traffic import GONE_S, RouterTraffic, TrafficCounts
from baton.autoscaling.traffic_store import TrafficStore
from baton.config.autoscaler import AutoscalerConfig
from baton.config.choices import Role
from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import BatonError, InvalidRequest, WorkerFailed
from baton.host.background import end_tasks
from baton.rpc.grpc_channel import make_server
from baton.rpc.grpc_errors import guarded
from baton.rpc.worker_plane import OPEN_PLANE
from baton.store.registry import DRAINING, Registry, WorkerRecord
from baton.store.supervision import PoolSizes
from baton.telemetry.metrics import SupervisorMetrics
from baton.v1 import control_pb2, control_pb2_grpc
from deploy.supervisor import autoscaling as autoscaling_module
from deploy.supervisor.autoscaling import (
    Autoscaling,
    ClusterObserver,
    change_role,
    words,
    workers_of,
)
from deploy.supervisor.reconciler import Phase
from tests.support.baton.autoscaled_cluster import AutoscaledCluster, Load
from tests.support.baton.demand import record as decode_record

DEADLINE_S = 20.0
SETTINGS = AutoscalerConfig(enabled=True, interval_s=0.5, cooldown_s=0.001)
POOLS: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}
Context = grpc.aio.ServicerContext[object, object]


class FakeSizes:
    def __init__(self, cluster: AutoscaledCluster) -> None:
        self.cluster = cluster
        self.chosen: dict[str, int] = {}
        self.failure: redis.RedisError | None = None
        self.follows = True

    async def read(self) -> dict[str, int]:
        if self.failure is not None:
            raise self.failure
        return dict(self.chosen)

    async def write(self, pool: str, count: int) -> None:
        self.chosen[pool] = count
        have = sum(one.pool == pool for one in self.cluster.workers)
        if self.follows:
            self.cluster.resize(pool, count - have)


class Play:
    """An autoscaler that runs until the test ends, on a cluster of two pools, p and d."""

    def __init__(self, prefill: int, decode: int, **settings: object) -> None:
        self.own = SETTINGS.model_copy(update=settings)
        self.cluster = AutoscaledCluster(prefill, decode, self.own)
        self.load = Load()
        self.asked: list[tuple[str, Role, float]] = []
        self.failure: Exception | None = None
        self.looks = 0
        self.away: Exception | None = None
        self.sizes = FakeSizes(self.cluster)
        self.metrics = SupervisorMetrics(CollectorRegistry())
        config = Config(
            autoscaler=self.own,
            pools=(
                PoolConfig(name="p", role="prefill", count=prefill),
                PoolConfig(name="d", role="decode", count=decode),
            ),
        )
        self.autoscaling = Autoscaling(
            config,
            cast(ClusterObserver, self),
            self.phases,
            cast(PoolSizes, self.sizes),
            self.metrics,
            self.change,
        )
        self.task = asyncio.create_task(self.autoscaling.run())

    # What it takes for a look at the cluster

    async def observe(self, now: float) -> ClusterFigures:
        self.looks += 1
        if self.away is not None:
            raise self.away
        return self.cluster.figures(self.load)

    async def forget_gone(self, now: float) -> None:
        """No worker leaves."""

    @property
    def records(self) -> Mapping[str, WorkerRecord]:
        return {one.slot: replace(decode_record(), slot=one.slot) for one in self.cluster.workers}

    def phases(self) -> Mapping[str, Phase]:
        return {one.slot: Phase.RUNNING for one in self.cluster.workers}

    async def change(self, worker: WorkerRecord, role: Role, deadline_s: float) -> float:
        self.asked.append((worker.slot, role, deadline_s))
        if self.failure is not None:
            raise self.failure
        self.cluster.turn(worker.slot, role)
        return 0.1

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not holds():
                if self.task.done():
                    self.task.result()
                await asyncio.sleep(0.001)

    def decisions(self, action: str, reason: Reason, mode: str = "live") -> float:
        labels = {"action": action, "reason": reason.value, "mode": mode}
        value = self.metrics.registry.get_sample_value
        return value("baton_autoscaler_decisions_total", labels) or 0.0

    async def end(self) -> None:
        await end_tasks([self.task])


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks follow one another at once; what is decided depends on figures alone."""
    sleep = asyncio.sleep
    monkeypatch.setattr(autoscaling_module, "_POLL_S", 0.001)
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: sleep(min(seconds, 0.002)))


async def test_roles_are_changed_counted_and_told() -> None:
    play = Play(3, 3)
    play.load = Load(input=4000, output=50)
    await play.until(lambda: play.cluster.have("prefill") == 5)
    assert {(role, deadline_s) for _, role, deadline_s in play.asked} == {("prefill", 30.0)}
    assert play.decisions("to_prefill", Reason.FORECAST) == 2
    needed = play.metrics.registry.get_sample_value
    assert needed("baton_autoscaler_needed_workers", {"role": "prefill"}) == pytest.approx(5, 0.2)
    assert "prefill has" in play.autoscaling.note()
    assert "becomes a prefill worker" in play.autoscaling.note()
    told = play.autoscaling.decisions()
    assert len(told) == 2
    assert all("becomes a prefill worker (forecast: prefill has" in one.text for one in told)
    await play.end()


async def test_a_dry_run_changes_nothing() -> None:
    play = Play(3, 3, dry_run=True, cooldown_s=0.05)
    play.load = Load(input=4000, output=50)
    await play.until(lambda: play.decisions("to_prefill", Reason.FORECAST, "dry_run") >= 2)
    assert play.asked == []
    assert play.cluster.have("prefill") == 3
    assert play.decisions("to_prefill", Reason.FORECAST) == 0
    assert play.autoscaling.note().startswith("dry run: ")
    assert play.autoscaling.decisions()[-1].text.startswith("would: ")
    await play.end()


async def test_pools_grow_and_shrink_by_what_is_written_down() -> None:
    play = Play(1, 1, min_workers=2, max_workers=3, cooldown_s=0.02)
    play.load = Load(input=3000, output=100)
    await play.until(lambda: play.sizes.chosen.get("p") == 2)
    assert play.cluster.have("prefill") == 2
    assert play.decisions("grow", Reason.FORECAST) == 1
    play.load = Load()
    await play.until(lambda: play.sizes.chosen.get("p") == 1)
    assert play.decisions("shrink", Reason.SURPLUS) == 1
    await play.end()


async def test_a_size_that_an_operator_has_just_chosen_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = Play(1, 1, max_workers=3, cooldown_s=0.02)
    play.sizes.chosen["p"] = 7
    play.load = Load(input=3000, output=100)
    failures = play.metrics.registry.get_sample_value
    name, labels = "baton_autoscaler_failures_total", {"action": "grow"}
    await play.until(lambda: (failures(name, labels) or 0) >= 1)
    assert play.sizes.chosen == {"p": 7}
    # One on which the supervisor does not act is given up, too.
    monkeypatch.setattr(autoscaling_module, "NOTICE_S", 0.01)
    play.sizes.chosen.clear()
    play.sizes.follows = False
    await play.until(lambda: play.sizes.chosen == {"p": 2})
    before = failures(name, labels) or 0
    await play.until(lambda: (failures(name, labels) or 0) > before)
    await play.end()


async def test_nothing_that_fails_ends_it() -> None:
    play = Play(3, 3, cooldown_s=0.02)
    play.load = Load(input=4000, output=50)
    play.failure = WorkerFailed("it is gone")
    await play.until(lambda: len(play.asked) >= 2)
    for away in (redis.ConnectionError("away"), OSError("away"), ValueError("a bug")):
        play.away = away
        looks = play.looks
        await play.until(lambda looks=looks: play.looks > looks + 1)  # type: ignore[misc]
    play.away, play.failure = None, None
    await play.until(lambda: play.cluster.have("prefill") > 3)
    await play.end()


def test_what_is_done_is_said_in_words() -> None:
    change = ChangeRole("d-1", "prefill", Reason.TTFT, "")
    assert words(change) == "d-1 becomes a prefill worker"
    assert words(Resize("p", 1, "prefill", Reason.TTFT, "")) == "p gets a worker"
    assert words(Resize("p", -1, "decode", Reason.TTFT, "")) == "p loses a worker"


def record(slot: str, role: str, state: str = "ready", running: int = 0) -> WorkerRecord:
    made = decode_record(role, running=running)
    return replace(made, slot=slot, incarnation=f"{slot}:1", state=state)


class FakeRegistry:
    def __init__(self, *records: WorkerRecord) -> None:
        self.records = {one.incarnation: one for one in records}

    async def all(self) -> dict[str, WorkerRecord]:
        return self.records


class FakeBoard:
    def __init__(self) -> None:
        self.told: dict[str, RouterTraffic] = {}
        self.removed: list[str] = []
        self.failure: OSError | None = None

    async def read(self) -> dict[str, RouterTraffic]:
        return dict(self.told)

    async def remove(self, routers: list[str]) -> None:
        if self.failure is not None:
            raise self.failure
        self.removed += routers


def observer_of(
    registry: FakeRegistry, board: FakeBoard, phases: Mapping[str, Phase]
) -> ClusterObserver:
    return ClusterObserver(
        Config(), cast(Registry, registry), cast(TrafficStore, board), lambda: phases
    )


def test_each_wanted_slot_is_published_with_its_state() -> None:
    phases = {
        "prefill-0": Phase.RUNNING,
        "prefill-1": Phase.RUNNING,
        "decode-0": Phase.STARTING,
        "decode-1": Phase.CRASH_LOOP,
        "decode-2": Phase.LEAVING,
        "decode-3": Phase.DRAINING,
        "decode-4": Phase.BACKING_OFF,
        "strange": Phase.RUNNING,
    }
    ready = {
        "prefill-0": record("prefill-0", "prefill", running=3),
        "prefill-1": record("prefill-1", "decode"),
        "decode-0": record("decode-0", "decode"),
    }
    found = {one.slot: one for one in workers_of(phases, ready, POOLS)}
    assert set(found) == set(phases) - {"decode-2", "strange"}
    first, guest = found["prefill-0"], found["prefill-1"]
    assert (first.role, first.number, first.sequences) == ("prefill", 0, 3)
    assert (guest.role, guest.pool, guest.state) == ("decode", "prefill", WorkerState.SERVING)
    assert found["decode-0"].state is WorkerState.STARTING, "the supervisor has the last word"
    assert found["decode-1"].state is WorkerState.FAILED
    assert found["decode-3"].state is found["decode-4"].state is WorkerState.STARTING


async def test_figures_come_with_the_second_look_and_not_while_one_is_unlisted() -> None:
    phases = {"prefill-0": Phase.RUNNING, "decode-0": Phase.RUNNING}
    registry = FakeRegistry(record("prefill-0", "prefill"), record("decode-0", "decode"))
    board = FakeBoard()
    observer = observer_of(registry, board, phases)
    for beat in range(4):
        board.told["r"] = RouterTraffic(beat, TrafficCounts(requests=10.0 * beat))
        seen = await observer.observe(float(beat))
        assert (seen.demand is None) == (beat == 0)
    assert set(observer.records) == {"prefill-0", "decode-0"}
    del registry.records["decode-0:1"]
    board.told["r"] = RouterTraffic(9, TrafficCounts(requests=100))
    assert (await observer.observe(9.0)).demand is None
    registry.records["decode-0:2"] = record("decode-0", "decode", DRAINING)
    board.told["r"] = RouterTraffic(10, TrafficCounts(requests=110))
    seen = await observer.observe(10.0)
    assert seen.demand is not None, "one that drains is known"
    assert set(observer.records) == {"prefill-0"}


async def test_routers_that_are_gone_are_struck_off() -> None:
    board = FakeBoard()
    board.told["r"] = RouterTraffic(1, TrafficCounts())
    observer = observer_of(FakeRegistry(), board, {})
    await observer.observe(0.0)
    await observer.observe(GONE_S)
    await observer.forget_gone(GONE_S)
    assert board.removed == ["r"]
    board.failure = OSError("away")
    await observer.forget_gone(GONE_S)


@pytest.mark.parametrize("routers", [0, 1])
async def test_without_workers_or_routers_nothing_is_known(routers: int) -> None:
    board = FakeBoard()
    observer = observer_of(FakeRegistry(), board, {})
    for beat in range(3):
        for number in range(routers):
            board.told[f"r{number}"] = RouterTraffic(beat, TrafficCounts())
        assert (await observer.observe(float(beat))).demand is None


class Worker(control_pb2_grpc.ControlServiceServicer):
    async def Drain(  # noqa: N802 - gRPC's name
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        raise NotImplementedError

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    @guarded
    async def ChangeRole(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ChangeRoleRequest, context: Context
    ) -> control_pb2.ChangeRoleResponse:
        self.asked.append((request.role, request.deadline_ms))
        if len(self.asked) > 1:
            raise InvalidRequest("not again")
        return control_pb2.ChangeRoleResponse(took_ms=1500)


async def test_a_worker_is_asked_and_its_error_is_reported() -> None:
    worker, server = Worker(), make_server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        known = replace(decode_record(), address=f"127.0.0.1:{port}")
        assert await change_role(OPEN_PLANE, known, "prefill", 30.0) == 1.5
        assert worker.asked == [("prefill", 30_000)]
        with pytest.raises(InvalidRequest, match="not again"):
            await change_role(OPEN_PLANE, known, "decode", 1.0)
    finally:
        await server.stop(0)
    with pytest.raises(BatonError):
        await change_role(OPEN_PLANE, known, "prefill", 0.1)
