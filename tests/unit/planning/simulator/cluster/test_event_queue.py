"""Order of events."""

from __future__ import annotations

from functools import partial

from planning.simulator.cluster.event_queue import STEP_END, EventQueue


def test_times_then_ranks_then_the_order_of_asking() -> None:
    events = EventQueue()
    seen: list[tuple[float, str]] = []

    def see(name: str) -> None:
        seen.append((events.now, name))

    for time_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d")):
        events.at(time_s, partial(see, name))
    events.at(2.0, partial(see, "b"), STEP_END)
    events.run()
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "c"), (2.0, "d")]


def test_what_has_passed_happens_now() -> None:
    events = EventQueue()
    seen: list[float] = []
    events.at(3.0, lambda: events.at(1.0, lambda: seen.append(events.now)))
    events.run()
    assert seen == [3.0]


def test_actions_may_ask_for_more() -> None:
    events = EventQueue()
    seen: list[float] = []

    def again() -> None:
        seen.append(events.now)
        if len(seen) < 3:
            events.after(0.5, again)

    events.after(0.5, again)
    events.run()
    assert seen == [0.5, 1.0, 1.5]
