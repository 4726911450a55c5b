"""Time in which a process could hear its peers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from baton.liveness.listening_clock import ListeningClock

MAX_S = 0.5


class Process:
    """Its clock, and the machine's."""

    def __init__(self) -> None:
        self.now = 100.0
        self.clock = ListeningClock(MAX_S, lambda: self.now)

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.25)):
            self.now += 0.25
            self.clock.tick()


def test_it_goes_as_the_machines_clock_does_while_its_owner_runs() -> None:
    process = Process()
    process.run(60.0)
    assert process.clock() == 160.0
    process.now += 0.1
    assert process.clock() == 160.1


def test_a_standstill_counts_for_no_more_than_a_late_tick() -> None:
    process = Process()
    process.run(1.0)
    process.now += 3600.0
    assert process.clock() == 101.0 + MAX_S
    process.clock.tick()
    assert process.clock() == 101.0 + MAX_S
    process.run(2.0)
    assert process.clock() == 103.0 + MAX_S


@given(st.lists(st.tuples(st.floats(0.0, 90.0), st.booleans())))
def test_it_never_goes_back_nor_faster_than_the_machines(steps: list[tuple[float, bool]]) -> None:
    process = Process()
    for seconds, ticks in steps:
        before, moment = process.clock(), process.now
        process.now += seconds
        if ticks:
            process.clock.tick()
        passed = process.clock() - before
        assert -1e-9 <= passed <= process.now - moment + MAX_S + 1e-9
