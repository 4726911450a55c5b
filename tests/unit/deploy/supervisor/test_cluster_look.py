"""The autoscaler's look at a live cluster: what it makes of slots, records and counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest

from baton.autoscaling.cluster_figures import WorkerState
from baton.autoscaling.traffic import GONE_S, RouterTraffic, TrafficCounts
from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config, Role
from baton.store.registry import DRAINING, Registry, WorkerRecord
from deploy.supervisor.cluster_look import ClusterLook, workers_of
from deploy.supervisor.pool_keeper import Phase
from tests.unit.baton.autoscaling.test_demand import record as decode_record

POOLS: dict[str, Role] = {"prefill": "prefill", "decode": "decode"}


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


def look_at(registry: FakeRegistry, board: FakeBoard, phases: Mapping[str, Phase]) -> ClusterLook:
    return ClusterLook(
        Config(), cast(Registry, registry), cast(TrafficStore, board), lambda: phases
    )


def test_each_wanted_slot_is_told_of_in_its_state() -> None:
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
    look = look_at(registry, board, phases)
    for beat in range(4):
        board.told["r"] = RouterTraffic(beat, TrafficCounts(requests=10.0 * beat))
        seen = await look.look(float(beat))
        assert (seen.demand is None) == (beat == 0)
    assert set(look.records) == {"prefill-0", "decode-0"}
    del registry.records["decode-0:1"]
    board.told["r"] = RouterTraffic(9, TrafficCounts(requests=100))
    assert (await look.look(9.0)).demand is None
    registry.records["decode-0:2"] = record("decode-0", "decode", DRAINING)
    board.told["r"] = RouterTraffic(10, TrafficCounts(requests=110))
    seen = await look.look(10.0)
    assert seen.demand is not None, "one that drains is known"
    assert set(look.records) == {"prefill-0"}


async def test_routers_that_are_gone_are_struck_off() -> None:
    board = FakeBoard()
    board.told["r"] = RouterTraffic(1, TrafficCounts())
    look = look_at(FakeRegistry(), board, {})
    await look.look(0.0)
    await look.look(GONE_S)
    await look.forget_gone(GONE_S)
    assert board.removed == ["r"]
    board.failure = OSError("away")
    await look.forget_gone(GONE_S)


@pytest.mark.parametrize("routers", [0, 1])
async def test_without_workers_or_routers_nothing_is_known(routers: int) -> None:
    board = FakeBoard()
    look = look_at(FakeRegistry(), board, {})
    for beat in range(3):
        for number in range(routers):
            board.told[f"r{number}"] = RouterTraffic(beat, TrafficCounts())
        assert (await look.look(float(beat))).demand is None
