"""When a worker's process is of no use any more."""

from __future__ import annotations

from deploy.workers.life_watch import END_S, LOOK_S, STUCK_S, LifeWatch

LOOKS = int(STUCK_S / LOOK_S)


def look(
    watch: LifeWatch,
    now: float = 0.0,
    beats: int | None = None,
    *,
    ended: bool = False,
    leave_by: float | None = None,
) -> str | None:
    return watch.look(now, beats=beats, ended=ended, leave_by=leave_by)


def test_who_beats_now_and_then_goes_on() -> None:
    watch = LifeWatch()
    for number in range(10 * LOOKS):
        assert look(watch, number * LOOK_S, beats=number // (LOOKS - 1)) is None


def test_a_worker_that_does_nothing_for_long_ends_and_not_for_a_pause_of_the_process() -> None:
    watch = LifeWatch()
    assert look(watch, 0.0, beats=7) is None
    for number in range(LOOKS + 1):
        assert look(watch, 1e6 + number * LOOK_S, beats=7) is None
    reason = look(watch, 1e6 + (LOOKS + 1) * LOOK_S, beats=7)
    assert reason is not None
    assert "event loop" in reason


def test_who_does_not_serve_yet_is_not_asked_for_beats() -> None:
    watch = LifeWatch()
    for number in range(10 * LOOKS):
        assert look(watch, number * LOOK_S) is None
    for number in range(10 * LOOKS, 11 * LOOKS + 1):
        assert look(watch, number * LOOK_S, beats=0) is None
    assert look(watch, (11 * LOOKS + 1) * LOOK_S, beats=0) is not None


def test_whose_thread_has_ended_ends() -> None:
    assert look(LifeWatch(), beats=3, ended=True) == "its thread has ended"


def test_a_drain_has_its_deadline_and_some_time_to_end() -> None:
    watch = LifeWatch()
    for now in range(int(100.0 + END_S) + 1):
        assert look(watch, float(now), beats=1, leave_by=100.0) is None
    assert look(watch, 100.5 + END_S, beats=1, leave_by=100.0) == "its drain does not end"
