"""Who is taken to hang."""

from __future__ import annotations

from router.silence import SilenceWatch


def ticks(watch: SilenceWatch, messages: dict[str, int], start: float, count: int) -> list[str]:
    return [name for n in range(count) for name in watch.tick(messages, start + n * 0.1)]


def test_silence_counts_from_when_a_worker_was_expected_to_speak() -> None:
    watch = SilenceWatch(1.0)
    assert ticks(watch, {}, 0.0, 50) == []
    assert ticks(watch, {"a": 3}, 5.0, 10) == []
    assert ticks(watch, {"a": 3}, 6.0, 2) == ["a"]


def test_a_message_ends_it() -> None:
    watch = SilenceWatch(1.0)
    for number in range(20):
        assert ticks(watch, {"a": number}, float(number), 9) == []


def test_one_that_stays_silent_is_told_again() -> None:
    watch = SilenceWatch(1.0)
    assert ticks(watch, {"a": 1, "b": 1}, 0.0, 35) == ["a", "b"] * 3


def test_a_listener_that_was_held_up_has_heard_nobody() -> None:
    watch = SilenceWatch(1.0)
    watch.tick({"a": 1}, 0.0)
    assert watch.tick({"a": 1}, 100.0) == []
    assert watch.tick({"a": 1}, 100.1) == []


def test_a_clock_that_goes_back_adds_nothing() -> None:
    watch = SilenceWatch(0.5)
    for now in (10.0, 5.0, 1.0, 0.5):
        assert watch.tick({"a": 1}, now) == []
