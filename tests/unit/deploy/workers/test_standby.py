"""The warm standby of a node: which process it is, and until when."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from deploy.workers.standby import (
    MAX_ASKS,
    PATIENCE_S,
    FileLock,
    Standby,
    StandbyFiles,
    StandbyWatch,
)

WAIT_S = 60.0


@pytest.fixture
def place(tmp_path: Path) -> StandbyFiles:
    return StandbyFiles(tmp_path, "node")


class Imports:
    """Takes the given time."""

    def __init__(self) -> None:
        self.begun, self.may_end = threading.Event(), threading.Event()
        self.ended = False

    def __call__(self) -> None:
        self.begun.set()
        assert self.may_end.wait(WAIT_S)
        self.ended = True


def standby(place: StandbyFiles, imports: Imports, fresh_s: float = 0.0) -> Standby:
    one = Standby(place, imports, fresh_s)
    one.begin()
    return one


def test_a_lock_is_one_holders(tmp_path: Path) -> None:
    first, second = FileLock(tmp_path / "lock"), FileLock(tmp_path / "lock")
    assert first.take()
    assert first.take()
    assert not second.take()
    assert second.is_held()
    first.give_back()
    first.give_back()
    assert not second.is_held()
    assert first.take()
    first.give_back()


def test_who_was_asked_imports_holds_the_lock_and_gives_it_back_when_it_is_taken(
    place: StandbyFiles,
) -> None:
    imports = Imports()
    imports.may_end.set()
    place.request()
    one = standby(place, imports)
    assert imports.begun.wait(WAIT_S)
    assert place.lock.is_held()
    assert not place.take_request()
    one.take()
    assert imports.ended
    assert not place.lock.is_held()


def test_a_taken_standby_waits_for_imports_in_progress(place: StandbyFiles) -> None:
    imports = Imports()
    place.request()
    one = standby(place, imports)
    assert imports.begun.wait(WAIT_S)
    taking = threading.Thread(target=one.take)
    taking.start()
    assert not imports.ended
    imports.may_end.set()
    taking.join(WAIT_S)
    assert imports.ended
    assert not place.lock.is_held()


def test_a_process_that_was_not_asked_or_is_already_taken_imports_nothing(
    place: StandbyFiles,
) -> None:
    imports = Imports()
    standby(place, imports).take()
    place.request()
    one = standby(place, imports, fresh_s=WAIT_S)
    one.leave()
    one.take()
    assert not imports.begun.is_set()
    assert place.take_request()


def test_a_node_has_one_warm_standby_and_then_the_next(place: StandbyFiles, tmp_path: Path) -> None:
    holder, imports = place.lock, Imports()
    assert holder.take()
    place.request()
    one = standby(place, imports)
    while any(tmp_path.glob("*.asked")):
        time.sleep(0.01)
    assert not imports.begun.is_set()
    holder.give_back()
    assert imports.begun.wait(WAIT_S)
    imports.may_end.set()
    one.take()


def test_imports_that_fail_let_the_lock_go(
    place: StandbyFiles, caplog: pytest.LogCaptureFixture
) -> None:
    def fails() -> None:
        raise ImportError("no module named torch")

    place.request()
    one = Standby(place, fails, 0.0)
    one.begin()
    for thread in threading.enumerate():
        if thread.name == "standby":
            thread.join(WAIT_S)
    assert "no module named torch" in caplog.text
    assert not place.lock.is_held()
    one.take()


def test_a_standby_is_requested_at_the_second_look_that_finds_none_and_not_forever() -> None:
    watch = StandbyWatch()
    assert not watch.look(0.0, stands_by=False)
    assert watch.look(5.0, stands_by=False)
    assert not watch.look(10.0, stands_by=False)
    assert watch.look(5.0 + PATIENCE_S, stands_by=False)
    assert not watch.look(80.0, stands_by=True)
    assert not watch.look(85.0, stands_by=False)
    assert watch.look(90.0, stands_by=False)
    asks = 1
    now = 90.0
    while not watch.gave_up:
        now += PATIENCE_S
        asks += watch.look(now, stands_by=False)
    assert asks == MAX_ASKS
    assert not watch.look(now + PATIENCE_S, stands_by=False)
