"""What routers read of the workers' loads, and how often."""

from __future__ import annotations

from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.simulated_worker import SimulatedWorker, SimulatedWorkerSettings
from planning.simulator.cluster.snapshot_board import REFRESH_S, SnapshotBoard, capacity_age_s
from planning.simulator.cluster.workers_side import WorkersSide
from tests.support.loadtest.clusters import profile


def workers(count: int, events: EventQueue) -> list[SimulatedWorker]:
    own, side = SimulatedWorkerSettings(32, None), WorkersSide(events)
    return [
        SimulatedWorker(number, "decode", profile(), own, events, side, lambda *_: None)
        for number in range(count)
    ]


def test_each_router_reads_the_latest_snapshot_of_each_changed_worker_once() -> None:
    events = EventQueue()
    first, second = every = workers(2, events)
    board = SnapshotBoard(every, 2, events)
    assert list(board.read(0).names) == [first.name, second.name]
    assert list(board.read(0).names) == []
    for turn in (1, 2):
        events.now = turn * REFRESH_S
        first.pool.allocate(turn)
        first.settle()
        assert list(board.read(0).names) == [first.name]
    found = board.read(1)
    assert list(found.names) == [first.name, second.name]
    assert found.loads[0].used_blocks == 3
    assert board.snapshots_read == 6


def test_routers_of_many_workers_read_less_often() -> None:
    events = EventQueue()
    assert SnapshotBoard(workers(1, events), 1, events).refresh_every_s == REFRESH_S
    many = SnapshotBoard(workers(1, events) * 10_000, 1, events)
    assert 4 * REFRESH_S < many.refresh_every_s < 6 * REFRESH_S
    assert capacity_age_s(100) < capacity_age_s(5000)
