"""Which worker slows down which, and when."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.host import Host, Wire, WorkClock
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.sharing import ALONE, Doing, Sharing
from tests.support.loadtest.clusters import profile
from worker.cores.core_sharing import BREAK_S, PATIENCE_S

SHARING = Sharing(
    decode_beside_prefill=1.5,
    decode_beside_long_prefill=3.0,
    decode_beside_decode=1.25,
    prefill_beside_decode=1.1,
    prefill_beside_prefill=1.2,
)


class FakeWorker:
    """Remembers its speeds, as the times that its steps take."""

    def __init__(self, host: Host, sharing: Sharing = SHARING) -> None:
        self.sharing = sharing
        self.stretches: list[float] = []
        host.join(self)

    def change_speed(self, speed: float) -> None:
        self.stretches.append(round(1 / speed, 9))


def at(events: EventQueue, host: Host, *told: tuple[float, FakeWorker, Doing]) -> None:
    for moment, worker, doing in told:
        events.at(moment, lambda worker=worker, doing=doing: host.tell(worker, doing))  # type: ignore[misc]
    events.run()


def test_a_worker_alone_is_not_slowed() -> None:
    host = Host("host-0", EventQueue())
    lone = FakeWorker(host)
    for doing in (Doing.DECODING, Doing.PROMPTS, Doing.NOTHING):
        host.tell(lone, doing)
    assert lone.stretches == []


def test_each_is_slowed_by_what_the_others_do() -> None:
    events = EventQueue()
    host = Host("host-0", events)
    prefill, decode, other = (FakeWorker(host) for _ in range(3))
    host.tell(decode, Doing.DECODING)
    host.tell(prefill, Doing.PROMPTS)
    host.tell(other, Doing.DECODING)
    assert prefill.stretches == [1.1, 1.2]
    assert decode.stretches == [1.5, 1.75]
    assert other.stretches == [1.75]
    host.tell(prefill, Doing.NOTHING)
    assert prefill.stretches[-1] == 1.0
    assert decode.stretches[-1] == other.stretches[-1] == 1.25


def test_telling_the_same_again_changes_nothing() -> None:
    host = Host("host-0", EventQueue())
    prefill, decode = FakeWorker(host), FakeWorker(host)
    for _ in range(3):
        host.tell(prefill, Doing.PROMPTS)
        host.tell(decode, Doing.DECODING)
    assert len(prefill.stretches) == len(decode.stretches) == 1


def test_long_prompts_slow_decoding_more() -> None:
    events = EventQueue()
    host = Host("host-0", events)
    prefill, decode = FakeWorker(host), FakeWorker(host)
    long_s = 10 * PATIENCE_S
    at(
        events,
        host,
        (0.0, decode, Doing.DECODING),
        (1.0, prefill, Doing.PROMPTS),
        (1.0 + long_s, prefill, Doing.NOTHING),
        # No break for the board: it goes on where it was.
        (1.0 + long_s + BREAK_S / 2, prefill, Doing.PROMPTS),
        (1.5 + long_s, prefill, Doing.NOTHING),
        (2.5 + long_s, prefill, Doing.PROMPTS),
        (2.5 + long_s + PATIENCE_S / 2, prefill, Doing.NOTHING),
    )
    assert decode.stretches == [1.5, 3.0, 1.0, 3.0, 1.0, 1.5, 1.0]


def test_breaks_that_are_none_do_not_restart_patience() -> None:
    events = EventQueue()
    host = Host("host-0", events)
    prefill, decode = FakeWorker(host), FakeWorker(host)
    host.tell(decode, Doing.DECODING)
    half_s = PATIENCE_S / 2
    at(
        events,
        host,
        (0.0, prefill, Doing.PROMPTS),
        (half_s, prefill, Doing.NOTHING),
        (half_s + BREAK_S / 2, prefill, Doing.PROMPTS),
        (2 * PATIENCE_S, prefill, Doing.NOTHING),
    )
    assert decode.stretches == [1.5, 1.0, 1.5, 3.0, 1.0]


def test_without_a_profile_of_it_sharing_costs_nothing() -> None:
    host = Host("host-0", EventQueue())
    prefill, decode = FakeWorker(host, ALONE), FakeWorker(host, ALONE)
    host.tell(prefill, Doing.PROMPTS)
    host.tell(decode, Doing.DECODING)
    assert prefill.stretches == decode.stretches == []


def test_fewer_than_no_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="hosts"):
        ClusterShape(1, 1, profile(), profile(), hosts=-1)


def test_an_engine_alone_keeps_virtual_time_to_the_bit() -> None:
    clock = WorkClock()
    times = np.array([0.1, 7.3, 1e5 + 0.1])
    assert clock.moments(times) is times
    assert [clock.moment(time) for time in times] == times.tolist()
    assert [clock.engine_time(time) for time in times] == times.tolist()


def test_half_the_speed_takes_twice_as_long() -> None:
    clock = WorkClock()
    clock.change(10.0, 0.5)
    clock.change(14.0, 2.0)
    assert clock.engine_time(15.0) == pytest.approx(14.0)
    assert clock.moment(14.0) == pytest.approx(15.0)
    assert clock.moments(np.array([9.0, 10.0, 11.0, 12.0, 14.0])) == pytest.approx(
        [9.0, 10.0, 12.0, 14.0, 15.0]
    )


def test_the_last_of_several_changes_at_a_moment_counts() -> None:
    clock = WorkClock()
    clock.change(1.0, 0.5)
    clock.change(1.0, 0.25)
    clock.change(1.0, 1.0)
    assert clock.moment(2.0) == 2.0


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 1.0)), max_size=8),
    st.lists(st.floats(0.0, 30.0), min_size=1, max_size=8),
)
def test_moments_lie_where_they_were_passed(
    changes: list[tuple[float, float]], passed: list[float]
) -> None:
    """Whatever came behind them, and whichever part of the past is asked for."""
    clock, moments, engine_times = WorkClock(), sorted(passed), []
    left = list(moments)
    now = 0.0
    for gap_s, speed in changes:
        now += gap_s
        while left and left[0] < now:
            engine_times.append(clock.engine_time(left.pop(0)))
        clock.change(now, speed)
    engine_times += [clock.engine_time(moment) for moment in left]
    assert clock.moments(np.array(engine_times)) == pytest.approx(moments, abs=1e-9)
    assert clock.moments(np.array(engine_times[-1:])) == pytest.approx(moments[-1:], abs=1e-9)


def test_a_transfer_takes_its_bytes_at_the_slower_end() -> None:
    one, other = Wire(100.0, 0.5), Wire(50.0)
    assert one.send(other, 100.0, 3.0) == pytest.approx(3.0 + 2.0 + 0.5)
    assert one.sent_bytes == 100.0
    assert one.busy_s == pytest.approx(2.0)


def test_a_sender_and_a_receiver_do_one_thing_at_a_time() -> None:
    one, other, third = Wire(100.0), Wire(100.0), Wire(100.0)
    assert one.send(other, 100.0, 0.0) == pytest.approx(1.0)
    assert one.send(third, 100.0, 0.0) == pytest.approx(2.0)
    assert third.send(other, 100.0, 0.0) == pytest.approx(2.0)
    assert other.send(third, 100.0, 0.0) == pytest.approx(3.0)
