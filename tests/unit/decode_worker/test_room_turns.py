"""Which request is next when a decode worker has room, and that none waits for ever."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_worker.room_turns import GRANT_S, NOTHING, Asker, Need, RoomTurns

PLACE = Need(1, 1)


def asker(router: str, name: str, *, preempted: bool = False) -> Asker:
    return Asker(router, (name, 0), 1, preempted)


def names(turns: RoomTurns, places: int, now: float = 0.0) -> list[str]:
    """Requests that get room in this order, if each router uses its grant at once."""
    granted = turns.grant(Need(places, 100), now)
    for grant in granted:
        turns.taken(grant.asker)
    return [grant.asker.attempt[0] for grant in granted]


def test_routers_take_turns_and_each_ones_requests_go_in_order() -> None:
    turns = RoomTurns()
    for router, name in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1")):
        turns.wait(asker(router, name), PLACE)
    assert names(turns, 2) == ["a1", "b1"]
    assert names(turns, 9) == ["c1", "a2", "a3"]
    assert not turns


def test_preempted_requests_come_before_all_others() -> None:
    turns = RoomTurns()
    turns.wait(asker("a", "a1"), PLACE)
    turns.wait(asker("b", "b1"), PLACE)
    turns.wait(asker("b", "b2", preempted=True), PLACE)
    assert turns.must_wait(asker("c", "new"))
    assert turns.must_wait(asker("c", "old", preempted=True))
    assert names(turns, 1) == ["b2"]
    assert not turns.must_wait(asker("c", "old", preempted=True))


def test_a_large_request_at_its_turn_is_not_overtaken() -> None:
    turns = RoomTurns()
    turns.wait(asker("a", "large"), Need(1, 50))
    turns.wait(asker("b", "small"), Need(1, 1))
    assert turns.grant(Need(4, 49), 0.0) == []
    assert turns.must_wait(asker("c", "another"))
    granted = turns.grant(Need(4, 51), 0.0)
    assert [grant.asker.attempt[0] for grant in granted] == ["large", "small"]
    assert turns.held(asker("c", "another")) == Need(2, 51)
    assert turns.held(asker("a", "any")) == Need(1, 1)


def test_an_unused_grant_ends() -> None:
    turns = RoomTurns()
    turns.wait(asker("a", "a1"), PLACE)
    turns.wait(asker("b", "b1"), PLACE)
    assert names_of(turns, 1, 0.0) == ["a1"]
    assert names_of(turns, 1, GRANT_S / 2) == []
    assert names_of(turns, 1, GRANT_S) == ["b1"]
    turns.leave(("b1", 0))
    assert not turns


def test_a_grant_that_does_not_suffice_ends() -> None:
    """The worker had counted fewer blocks, or the router gives the room to a larger request."""
    turns = RoomTurns()
    turns.wait(asker("a", "a1"), Need(1, 0))
    turns.grant(Need(4, 9), 0.0)
    turns.wait(Asker("a", ("a1", 1)), Need(1, 8))
    assert turns.held(asker("b", "b1")) == NOTHING
    assert [grant.need for grant in turns.grant(Need(1, 9), 0.0)] == [Need(1, 8)]


def names_of(turns: RoomTurns, places: int, now: float) -> list[str]:
    return [grant.asker.attempt[0] for grant in turns.grant(Need(places, 100), now)]


def test_who_gives_up_or_is_gone_holds_nothing() -> None:
    turns = RoomTurns()
    for router, name in (("a", "a1"), ("b", "b1"), ("b", "b2")):
        turns.wait(asker(router, name), PLACE)
    assert names_of(turns, 2, 0.0) == ["a1", "b1"]
    turns.leave(("a1", 0))
    turns.leave_router("b")
    assert turns.held(asker("c", "c1")) == NOTHING
    assert not turns
    turns.wait(asker("a", "a1"), PLACE)
    turns.clear()
    assert not turns


def test_a_router_that_does_not_read_is_passed_over_and_keeps_its_turn() -> None:
    turns = RoomTurns()
    turns.wait(asker("deaf", "d1"), PLACE)
    turns.wait(asker("b", "b1"), PLACE)
    granted = turns.grant(Need(1, 9), 0.0, lambda router: router != "deaf")
    assert [grant.asker.attempt[0] for grant in granted] == ["b1"]
    turns.taken(granted[0].asker)
    assert names(turns, 1) == ["d1"]


REQUESTS = st.lists(
    st.tuples(st.sampled_from("abcd"), st.integers(1, 8), st.integers(0, 9).map(lambda n: n == 0)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(REQUESTS, st.lists(st.integers(0, 2), min_size=1, max_size=80))
def test_all_routers_are_served_in_fair_turns(
    requests: list[tuple[str, int, bool]], ends: list[int]
) -> None:
    """A worker of 4 places and 16 blocks. Requests come, those without room wait, others end.

    Between a router's wait and its turn, each other router gets at most one turn, except for
    preempted requests. No more is promised than there is. All are served at last.
    """
    turns, running = RoomTurns(), list[Need]()
    overtaken: dict[str, Counter[str]] = {}
    waiting: Counter[str] = Counter()
    arrivals = [
        (asker(router, f"{router}{n}", preempted=preempted), Need(1, blocks))
        for n, (router, blocks, preempted) in enumerate(requests)
    ]
    needs = {one.attempt: need for one, need in arrivals}
    steps = iter([*ends, *([2] * (4 * len(arrivals) + 8))])
    served = 0
    while served < len(needs):
        if arrivals:
            one, need = arrivals.pop(0)
            free = free_of(running) - turns.held(one)
            if turns.must_wait(one) or not need.fits(free):
                turns.wait(one, need)
                waiting[one.router_id] += 1
                overtaken.setdefault(one.router_id, Counter())
            else:
                turns.taken(one)
                running.append(need)
                served += 1
        for _ in range(next(steps)):
            if running:
                running.pop(0)
        for grant in turns.grant(free_of(running), 0.0):
            router = grant.asker.router_id
            running.append(needs[grant.asker.attempt])
            turns.taken(grant.asker)
            served += 1
            waiting[router] -= 1
            if not grant.asker.is_preempted:
                for other, passed in overtaken.items():
                    if other != router and waiting[other]:
                        passed[router] += 1
                        assert passed[router] <= 1, f"{router} goes twice before {other}"
            overtaken[router] = Counter()
        free = free_of(running)
        assert free.places >= 0
        assert free.blocks >= 0
    assert not turns


def free_of(running: list[Need]) -> Need:
    free = Need(4, 16)
    for need in running:
        free -= need
    return free


def test_choices_that_migrate_wait_by_themselves() -> None:
    turns = RoomTurns()
    for attempt, choice in ((4, 0), (5, 1)):
        turns.wait(Asker("a", ("r", attempt), choice=choice), PLACE)
    turns.taken(Asker("a", ("r", 6), choice=1))
    assert names_of(turns, 4, 0.0) == ["r"]
    assert not turns.held(Asker("a", ("r", 7), choice=0)).places
