"""When a worker is to ask at once whether it still lives."""

from __future__ import annotations

from worker.registry.own_lease import OwnLease

TTL_S, HEARTBEAT_S, BEAT_S = 4.0, 1.0, 0.25


class Life:
    """A lease that lives on from moment to moment."""

    def __init__(self) -> None:
        self.lease = OwnLease(TTL_S, HEARTBEAT_S)
        self.now = 100.0
        self.lease.beat(self.now)
        self.lease.renewed(self.now)

    def live(self, seconds: float, *, renewing: bool = True) -> bool:
        """The event loop runs; the registry can be reached or not. Whether anything is in doubt."""
        end = self.now + seconds
        while self.now < end:
            self.now += BEAT_S
            assert not self.lease.beat(self.now)
            if renewing and self.now % HEARTBEAT_S == 0:
                self.lease.renewed(self.now)
        return self.lease.stood_still

    def stand_still(self, seconds: float) -> bool:
        self.now += seconds
        woke = self.lease.beat(self.now)
        assert woke is self.lease.stood_still
        return woke


def test_a_worker_that_lives_on_is_in_no_doubt() -> None:
    life = Life()
    assert not life.live(60.0)
    assert life.lease.registered


def test_a_standstill_is_in_doubt_until_the_registry_is_asked_afterwards() -> None:
    life = Life()
    life.live(10.0)
    before = life.now
    assert life.stand_still(TTL_S + BEAT_S)
    life.lease.renewed(before)
    assert life.live(0.75, renewing=False), "a renewal from before it stood still says nothing"
    life.lease.renewed(life.now)
    assert not life.live(5.0)
    assert life.lease.registered


def test_another_life_begins_without_doubt_and_without_an_entry() -> None:
    life = Life()
    life.live(10.0)
    assert life.stand_still(TTL_S + BEAT_S)
    life.lease.begin()
    assert not life.lease.stood_still
    assert not life.lease.registered


def test_a_short_stop_costs_nothing() -> None:
    life = Life()
    life.live(10.0)
    assert not life.stand_still(TTL_S - HEARTBEAT_S - BEAT_S)
    assert not life.live(10.0)


def test_a_registry_that_was_away_before_is_to_blame() -> None:
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
    assert not lease.stood_still
