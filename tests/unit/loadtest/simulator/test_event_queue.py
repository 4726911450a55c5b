"""Order of events."""

from __future__ import annotations

from loadtest.simulator.event_queue import STEP_END, EventQueue


def test_times_then_ranks_then_the_order_of_asking() -> None:
    events, seen = EventQueue(), []
    for time_s, name in ((2.0, "c"), (1.0, "a"), (2.0, "d")):
        events.at(time_s, lambda name=name: seen.append((events.now, name)))
    events.at(2.0, lambda: seen.append((events.now, "b")), STEP_END)
    events.run()
    assert seen == [(1.0, "a"), (2.0, "b"), (2.0, "c"), (2.0, "d")]


def test_what_has_passed_happens_now() -> None:
    events, seen = EventQueue(), []
    events.at(3.0, lambda: events.at(1.0, lambda: seen.append(events.now)))
    events.run()
    assert seen == [3.0]


def test_actions_may_ask_for_more() -> None:
    events, seen = EventQueue(), []

    def again() -> None:
        seen.append(events.now)
        if len(seen) < 3:
            events.after(0.5, again)

    events.after(0.5, again)
    events.run()
    assert seen == [0.5, 1.0, 1.5]
