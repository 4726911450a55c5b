"""Who is silent for how long."""

from __future__ import annotations

from router.batches.lease import LeaseWatch


def test_a_beat_that_rises_keeps_the_lease() -> None:
    watch = LeaseWatch(10.0)
    assert not any(watch.silent("a", beat, 5.0 * beat) for beat in range(20))


def test_a_beat_that_stands_still_is_silent_after_the_lease() -> None:
    watch = LeaseWatch(10.0)
    assert not watch.silent("a", 7, 100.0)
    assert not watch.silent("a", 7, 109.9)
    assert watch.silent("a", 7, 110.0)
    assert not watch.silent("a", 8, 111.0)
    assert not watch.silent("a", 8, 120.9)


def test_each_is_watched_from_its_first_sight() -> None:
    watch = LeaseWatch(10.0)
    watch.silent("a", 1, 0.0)
    assert not watch.silent("b", 1, 100.0)
    watch.keep(["b"])
    assert not watch.silent("a", 1, 100.0)
    assert watch.silent("b", 1, 110.0)
