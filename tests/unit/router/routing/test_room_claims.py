"""What is known of the room at decode workers that have refused requests."""

from __future__ import annotations

from baton.request import LoadSnapshot
from router.routing.policy import ClassRoute, RouteSettings
from router.routing.room import ClassRoom, HeldRoom
from router.routing.room_claims import RoomClaims
from router.routing.worker_table import PoolFilter, WorkerTable
from tests.support.router.workers import record

SHORT, LONG = PoolFilter(frozenset({"short"})), PoolFilter(frozenset({"long"}))
SETTINGS = RouteSettings(
    classes={"short": ClassRoute(decode=SHORT), "long": ClassRoute(decode=LONG)}
)


def claims(**pools: str) -> tuple[RoomClaims, WorkerTable]:
    """Idle decode workers, each in a pool."""
    table = WorkerTable()
    for name, pool in pools.items():
        table.add(record(name, pool=pool, max_sequences=4))
        table.set_up(name, True)
        table.set_load(name, LoadSnapshot(name, free_blocks=50), 0.0)
    return RoomClaims(SETTINGS, table), table


def test_a_worker_that_has_refused_a_request_is_full_until_it_grants_room() -> None:
    rooms, _ = claims(a="short", b="short", c="long")
    assert rooms.room() == {}
    rooms.refused("a", ("r", 0), "short")
    assert rooms.room() == {"short": ClassRoom(4, 50.0, is_claimed=True)}
    rooms.refused("b", ("r", 1), "short")
    assert rooms.room() == {"short": ClassRoom(0, 0.0, is_claimed=True)}
    assert not rooms.is_claimed("long")
    for worker, attempt in (("a", ("r", 0)), ("b", ("r", 1))):
        rooms.granted(worker, attempt)
    assert rooms.room() == {"short": ClassRoom(8, 50.0, is_claimed=False)}
    assert rooms.leave("r") == []
    assert rooms.room() == {}


def test_an_accepted_request_leaves_its_turns_and_no_others() -> None:
    rooms, table = claims(a="short", b="short")
    rooms.refused("a", ("r", 0), "short")
    rooms.refused("a", ("r", 1), "short", choice=2)
    rooms.refused("b", ("other", 0), "short")
    assert rooms.leave("r") == [HeldRoom("a", ("r", 0))]
    row = table.row("a")
    assert row is not None
    assert table.refusals[row] == 1
    assert rooms.leave("r", 2) == [HeldRoom("a", ("r", 1))]
    assert table.refusals[row] == 0
    assert rooms.is_claimed("short")
    rooms.forget("b")
    assert not rooms.is_claimed("short")


def test_a_worker_serves_the_classes_of_its_pool() -> None:
    rooms, _ = claims(a="short", c="long")
    assert rooms.classes_at("a") == {"short"}
    assert rooms.classes_at("c") == {"long"}
    assert rooms.classes_at("gone") == frozenset()
