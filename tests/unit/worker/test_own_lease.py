"""When a worker is to blame itself for the loss of its entry."""

from __future__ import annotations

from worker.own_lease import OwnLease

TTL_S, HEARTBEAT_S, BEAT_S = 4.0, 1.0, 0.25


class Life:
    """A lease that lives on from moment to moment."""

    def __init__(self) -> None:
        self.lease = OwnLease(TTL_S, HEARTBEAT_S)
        self.now = 100.0
        self.lease.beat(self.now)
        self.lease.renewed(self.now)

    def live(self, seconds: float, *, renewing: bool = True) -> bool:
        """The event loop runs; the registry can be reached or not."""
        end = self.now + seconds
        while self.now < end:
            self.now += BEAT_S
            self.lease.beat(self.now)
            if renewing and self.now % HEARTBEAT_S == 0:
                self.lease.renewed(self.now)
        return self.lease.lapsed

    def stand_still(self, seconds: float) -> bool:
        self.now += seconds
        return self.lease.beat(self.now)


def test_who_lives_on_keeps_it() -> None:
    life = Life()
    assert not life.live(60.0)
    assert life.lease.registered


def test_who_stood_still_for_longer_than_it_lasts_has_lost_it_until_another_life() -> None:
    life = Life()
    life.live(10.0)
    assert life.stand_still(TTL_S + BEAT_S)
    life.lease.renewed(life.now)
    assert life.live(5.0), "a renewal that was under way does not bring it back"
    life.lease.begin()
    assert not life.lease.lapsed
    assert not life.lease.registered
    assert not life.live(5.0)


def test_a_short_stop_costs_nothing() -> None:
    life = Life()
    life.live(10.0)
    assert not life.stand_still(TTL_S - HEARTBEAT_S - BEAT_S)
    assert not life.live(10.0)


def test_a_registry_that_is_away_condemns_nobody_not_even_who_stands_still_meanwhile() -> None:
    life = Life()
    life.live(10.0)
    assert not life.live(60.0, renewing=False)
    assert not life.stand_still(TTL_S + 1)
    assert not life.live(10.0, renewing=False)
    assert not life.live(10.0)


def test_before_there_is_an_entry_there_is_none_to_lose() -> None:
    lease = OwnLease(TTL_S, HEARTBEAT_S)
    assert not lease.beat(0.0)
    assert not lease.beat(100.0)
