"""Who slows whom down, and when."""

from __future__ import annotations

import pytest

from baton.errors import ConfigError
from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.host import Host
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


def test_nobody_slows_a_worker_alone() -> None:
    host = Host(EventQueue())
    lone = FakeWorker(host)
    for doing in (Doing.DECODING, Doing.PROMPTS, Doing.NOTHING):
        host.tell(lone, doing)
    assert lone.stretches == []


def test_each_is_slowed_by_what_the_others_do() -> None:
    events = EventQueue()
    host = Host(events)
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
    host = Host(EventQueue())
    prefill, decode = FakeWorker(host), FakeWorker(host)
    for _ in range(3):
        host.tell(prefill, Doing.PROMPTS)
        host.tell(decode, Doing.DECODING)
    assert len(prefill.stretches) == len(decode.stretches) == 1


def test_long_prompts_slow_decoding_more() -> None:
    events = EventQueue()
    host = Host(events)
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


def test_breaks_that_are_none_do_not_start_patience_anew() -> None:
    events = EventQueue()
    host = Host(events)
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
    host = Host(EventQueue())
    prefill, decode = FakeWorker(host, ALONE), FakeWorker(host, ALONE)
    host.tell(prefill, Doing.PROMPTS)
    host.tell(decode, Doing.DECODING)
    assert prefill.stretches == decode.stretches == []


def test_fewer_than_no_hosts_are_refused() -> None:
    with pytest.raises(ConfigError, match="hosts"):
        ClusterShape(1, 1, profile(), profile(), hosts=-1)
