"""When an engine hangs."""

from __future__ import annotations

from worker.engine_watch import EngineWatch


def hangs_at(watch: EngineWatch, steps: int, in_flight: int, start: float) -> float | None:
    """The first of a hundred ticks, one a second, that finds a hang."""
    found = (start + n for n in range(100) if watch.tick(steps, in_flight, start + n))
    return next(found, None)


def test_a_step_that_does_not_end_is_a_hang() -> None:
    watch = EngineWatch(limit_s=60.0)
    assert hangs_at(watch, 7, 1, 0.0) == 60.0


def test_one_that_has_nothing_to_do_does_not_hang() -> None:
    assert hangs_at(EngineWatch(limit_s=60.0), 7, 0, 0.0) is None


def test_every_step_is_progress() -> None:
    watch = EngineWatch(limit_s=60.0)
    for steps in range(300):
        assert not watch.tick(steps // 50, 2, float(steps))


def test_a_process_that_stood_still_has_seen_nothing() -> None:
    watch = EngineWatch(limit_s=60.0)
    watch.tick(7, 1, 0.0)
    assert not watch.tick(7, 1, 3600.0)
    assert hangs_at(watch, 7, 1, 3601.0) is not None
