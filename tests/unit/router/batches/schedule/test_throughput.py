"""The speed of batches, learned from what they have done."""

from __future__ import annotations

import math

import pytest

from router.batches.schedule.throughput import MIN_LINES, MIN_S, NEW_SHARE, Progress, Throughput


def learned(
    *looks: tuple[float, int, float], known: float | None = None, per_line: int = 10
) -> list[float]:
    """What is learned from samples of a time, the lines done, and the tokens in flight."""
    throughput, found = Throughput(), []
    for now, lines, asked in looks:
        progress = Progress(lines, lines * per_line, known)
        if (speed := throughput.observe(progress, asked, now)) is not None:
            found.append(speed)
    return found


def test_a_speed_takes_enough_time_and_enough_lines() -> None:
    assert learned((0, 0, math.inf), (MIN_S - 1, 100, math.inf)) == []
    assert learned((0, 0, math.inf), (99, MIN_LINES - 1, math.inf)) == []
    assert learned((0, 0, math.inf), (20, 100, math.inf)) == [50.0]


def test_idle_time_does_not_count() -> None:
    looks = [(0, 0, math.inf), (5, 50, 0.0), (1000, 60, math.inf), (1005, 110, math.inf)]
    assert learned(*looks) == [100.0]


def test_new_speeds_are_weighed_against_earlier_ones() -> None:
    (found,) = learned((0, 0, math.inf), (10, 100, math.inf), known=200.0)
    assert found == pytest.approx(200 * (1 - NEW_SHARE) + 100 * NEW_SHARE)


def test_a_pace_is_only_a_lower_bound() -> None:
    # 10 tokens a second were asked for, and came.
    assert learned((0, 0, 10.0), (10, 10, 10.0), known=200.0) == [200.0]
    assert learned((0, 0, 10.0), (10, 10, 10.0), known=5.0) == [10.0]
    # 100 were asked for: the slack has no more than 10.
    (found,) = learned((0, 0, 100.0), (10, 10, 100.0), known=200.0)
    assert found == pytest.approx(200 * (1 - NEW_SHARE) + 10 * NEW_SHARE)
