"""What becomes of a worker's slot, in a world without processes."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deploy.supervisor.pool_keeper import (
    CRASH_LOOP_DEATHS,
    FIRST_PAUSE_S,
    HEALTHY_S,
    LEAVE_S,
    LONGEST_PAUSE_S,
    PATIENCE_S,
    SILENCE_S,
    START_S,
    Order,
    Phase,
    PoolKeeper,
    Sight,
    pause_after,
)

SLOT = "decode-0"
LOOK_S = 0.5
DRAIN_S = 30.0


def keeper_of(*slots: str) -> PoolKeeper:
    keeper = PoolKeeper(DRAIN_S)
    keeper.want(slots)
    return keeper


def die(keeper: PoolKeeper, now: float, error: str = "boom") -> None:
    """A life begins, and ends at once."""
    keeper.see(SLOT, Sight.STARTING, now)
    keeper.see(SLOT, Sight.NOBODY, now, error)


def look(keeper: PoolKeeper, sight: Sight, now: float) -> dict[str, Order]:
    keeper.see(SLOT, sight, now)
    return keeper.decide(now)


def test_an_empty_slot_is_filled_at_once_and_only_once() -> None:
    keeper = keeper_of(SLOT)
    keeper.see(SLOT, Sight.NOBODY, 0.0)
    assert keeper.decide(0.0) == {SLOT: Order.START}
    assert keeper.decide(LOOK_S) == {}
    assert keeper.states(LOOK_S)[SLOT].phase is Phase.STARTING


def test_an_order_of_which_nothing_comes_is_given_again() -> None:
    keeper = keeper_of(SLOT)
    keeper.see(SLOT, Sight.NOBODY, 0.0)
    keeper.decide(0.0)
    keeper.could_not(SLOT, "Ray is away")
    assert keeper.decide(PATIENCE_S - 0.1) == {}
    assert keeper.decide(PATIENCE_S) == {SLOT: Order.START}
    state = keeper.states(PATIENCE_S)[SLOT]
    assert (state.deaths, state.last_error) == (0, "Ray is away")


def test_who_dies_before_anybody_looks_has_died() -> None:
    keeper = keeper_of(SLOT)
    now = 0.0
    for deaths in range(1, CRASH_LOOP_DEATHS + 1):
        assert not keeper.see(SLOT, Sight.NOBODY, now)
        assert keeper.decide(now) == {SLOT: Order.START}
        keeper.started(SLOT)
        now += LOOK_S
        assert keeper.see(SLOT, Sight.NOBODY, now, "cannot start")
        assert keeper.decide(now) == {}
        state = keeper.states(now)[SLOT]
        assert (state.deaths, state.last_error) == (deaths, "cannot start")
        now += pause_after(deaths)
    assert keeper.states(now - LOOK_S)[SLOT].phase is Phase.CRASH_LOOP


def test_who_serves_is_left_alone_by_a_keeper_that_knows_nothing() -> None:
    keeper = keeper_of(SLOT, "decode-1")
    for slot in (SLOT, "decode-1"):
        keeper.see(slot, Sight.SERVING, 5.0)
    assert keeper.decide(5.0) == {}
    assert {state.phase for state in keeper.states(5.0).values()} == {Phase.RUNNING}


def test_pauses_double_up_to_the_longest() -> None:
    pauses = [pause_after(deaths) for deaths in range(1, 2000)]
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses[1] == 2 * FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S


def test_deaths_are_backed_off_from_and_become_a_crash_loop_that_says_why() -> None:
    keeper, now = keeper_of(SLOT), 0.0
    for deaths in range(1, CRASH_LOOP_DEATHS + 1):
        die(keeper, now, f"reason {deaths}")
        state = keeper.states(now)[SLOT]
        assert (state.deaths, state.last_error) == (deaths, f"reason {deaths}")
        assert state.wait_s == pytest.approx(pause_after(deaths))
        looping = deaths >= CRASH_LOOP_DEATHS
        assert state.phase is (Phase.CRASH_LOOP if looping else Phase.BACKING_OFF)
        assert keeper.decide(now + pause_after(deaths) - 0.01) == {}
        now += pause_after(deaths)
        assert keeper.decide(now) == {SLOT: Order.START}
    # The next try is shown as part of the loop until it has gone well.
    keeper.see(SLOT, Sight.STARTING, now)
    assert keeper.states(now)[SLOT].phase is Phase.CRASH_LOOP
    keeper.see(SLOT, Sight.SERVING, now)
    assert keeper.states(now)[SLOT].phase is Phase.RUNNING
    assert keeper.states(now)[SLOT].deaths == CRASH_LOOP_DEATHS


def test_a_healthy_while_forgives() -> None:
    keeper = keeper_of(SLOT)
    die(keeper, 0.0)
    keeper.see(SLOT, Sight.SERVING, 1.0)
    keeper.see(SLOT, Sight.SERVING, 1.0 + HEALTHY_S - 0.1)
    assert keeper.states(30.0)[SLOT].deaths == 1
    keeper.see(SLOT, Sight.SERVING, 1.0 + HEALTHY_S)
    state = keeper.states(31.0)[SLOT]
    assert (state.deaths, state.last_error) == (0, "")


def test_who_is_silent_for_long_is_ended_and_replaced_and_who_wakes_in_time_is_not() -> None:
    keeper = keeper_of(SLOT)
    keeper.see(SLOT, Sight.SERVING, 0.0)
    now = 1.0
    for sight in (Sight.SILENT, Sight.SERVING, Sight.SILENT):
        for _ in range(int(SILENCE_S / LOOK_S)):
            assert look(keeper, sight, now) == {}
            now += LOOK_S
    look(keeper, Sight.SILENT, now)
    assert look(keeper, Sight.SILENT, now + LOOK_S) == {SLOT: Order.END}
    now += SILENCE_S
    keeper.see(SLOT, Sight.NOBODY, now, "killed")
    assert "nothing was heard" in keeper.states(now)[SLOT].last_error
    assert keeper.decide(now + 1) == {SLOT: Order.START}


def test_an_owner_that_stood_still_itself_ends_no_worker_for_that() -> None:
    keeper = keeper_of(SLOT)
    keeper.see(SLOT, Sight.SERVING, 0.0)
    assert look(keeper, Sight.SILENT, 1.0) == {}
    # The whole host stands still; then the worker's answer is not read yet.
    assert look(keeper, Sight.SILENT, 1.0 + 2 * SILENCE_S) == {}
    assert look(keeper, Sight.SILENT, 1.0 + 2 * SILENCE_S + LOOK_S) == {}
    assert look(keeper, Sight.SERVING, 1.0 + 2 * SILENCE_S + 2 * LOOK_S) == {}


def test_who_does_not_come_to_serve_is_ended() -> None:
    keeper = keeper_of(SLOT)
    keeper.see(SLOT, Sight.STARTING, 0.0)
    assert keeper.decide(START_S - 1) == {}
    assert keeper.decide(START_S) == {SLOT: Order.END}


def test_who_is_not_wanted_any_more_is_drained_and_forgotten() -> None:
    keeper = keeper_of(SLOT, "decode-1")
    for slot in (SLOT, "decode-1"):
        keeper.see(slot, Sight.SERVING, 0.0)
    keeper.want([SLOT])
    assert keeper.decide(1.0) == {"decode-1": Order.DRAIN}
    assert keeper.states(1.0)["decode-1"].phase is Phase.LEAVING
    keeper.see("decode-1", Sight.LEAVING, 1.5)
    assert keeper.decide(1.0 + PATIENCE_S) == {}
    assert not keeper.see("decode-1", Sight.NOBODY, 12.0)
    assert keeper.decide(12.0) == {}
    assert set(keeper.states(12.0)) == {SLOT}


@pytest.mark.parametrize("sight", [Sight.SERVING, Sight.LEAVING])
def test_who_is_not_wanted_and_does_not_go_is_ended(sight: Sight) -> None:
    keeper = keeper_of(SLOT)
    keeper.see(SLOT, Sight.SERVING, 0.0)
    keeper.want([])
    assert keeper.decide(0.0) == {SLOT: Order.DRAIN}
    keeper.see(SLOT, sight, 1.0)
    again = {SLOT: Order.DRAIN} if sight is Sight.SERVING else {}
    assert keeper.decide(DRAIN_S + LEAVE_S - 1) == again
    assert keeper.decide(DRAIN_S + LEAVE_S) == {SLOT: Order.END}


@pytest.mark.parametrize("sight", [Sight.STARTING, Sight.SILENT])
def test_who_is_not_wanted_and_runs_nothing_is_ended_at_once(sight: Sight) -> None:
    keeper = keeper_of(SLOT)
    keeper.see(SLOT, sight, 0.0)
    keeper.want([])
    assert keeper.decide(0.0) == {SLOT: Order.END}


def test_a_drained_worker_is_no_death_and_another_one_is_started_at_once() -> None:
    keeper = keeper_of(SLOT)
    die(keeper, 0.0)
    keeper.see(SLOT, Sight.SERVING, 1.0)
    keeper.see(SLOT, Sight.LEAVING, 2.0)
    assert keeper.decide(2.0) == {}
    assert keeper.states(2.0)[SLOT].phase is Phase.DRAINING
    assert not keeper.see(SLOT, Sight.NOBODY, 3.0, "its process has died")
    assert keeper.decide(3.0) == {SLOT: Order.START}
    state = keeper.states(3.0)[SLOT]
    assert (state.phase, state.deaths, state.wait_s) == (Phase.STARTING, 1, 0.0)


def test_who_leaves_may_be_wanted_again_and_is_replaced() -> None:
    keeper = keeper_of(SLOT)
    keeper.see(SLOT, Sight.SERVING, 0.0)
    keeper.want([])
    keeper.decide(0.0)
    keeper.see(SLOT, Sight.LEAVING, 1.0)
    keeper.want([SLOT])
    assert keeper.decide(2.0) == {}
    assert not keeper.see(SLOT, Sight.NOBODY, 3.0)
    assert keeper.decide(3.0) == {SLOT: Order.START}


def test_an_earlier_keepers_memory_goes_on() -> None:
    keeper = keeper_of(SLOT)
    keeper.remember(SLOT, CRASH_LOOP_DEATHS, "no memory")
    keeper.see(SLOT, Sight.NOBODY, 0.0)
    assert keeper.states(0.0)[SLOT].phase is Phase.CRASH_LOOP
    die(keeper, 0.0)
    assert keeper.decide(pause_after(CRASH_LOOP_DEATHS + 1) - 0.01) == {}


AFTER = {Order.START: Sight.STARTING, Order.DRAIN: Sight.LEAVING, Order.END: Sight.NOBODY}
"""What becomes of a slot by an order."""


class Cluster(RuleBasedStateMachine):
    """Workers that live and die at random, a keeper that is replaced now and then."""

    slots = tuple(f"w-{number}" for number in range(3))

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.world = dict.fromkeys(self.slots, Sight.NOBODY)
        self.wanted = set(self.slots)
        self.new_keeper()

    @rule()
    def new_keeper(self) -> None:
        """It begins with what it sees."""
        self.keeper = keeper_of(*self.wanted)

    @rule(seconds=st.floats(0.1, 100.0), obey=st.booleans())
    def look(self, seconds: float, obey: bool) -> None:
        """Time passes; orders are carried out, or get lost."""
        self.now += seconds
        known = self.keeper.states(self.now)
        for slot, sight in self.world.items():
            if slot in known or sight is not Sight.NOBODY:
                self.keeper.see(slot, sight, self.now)
        for slot, order in self.keeper.decide(self.now).items():
            if order is Order.START:
                assert slot in self.wanted
                assert self.world[slot] is Sight.NOBODY, "nobody is placed beside somebody"
            else:
                assert slot not in self.wanted or self.world[slot] is not Sight.SERVING
            if order is Order.DRAIN:
                assert slot not in self.wanted
                assert self.world[slot] is Sight.SERVING
            if obey:
                self.world[slot] = AFTER[order]

    @rule(
        slot=st.sampled_from(slots),
        sight=st.sampled_from((Sight.SERVING, Sight.SILENT, Sight.LEAVING)),
    )
    def change(self, slot: str, sight: Sight) -> None:
        if self.world[slot] is not Sight.NOBODY:
            self.world[slot] = sight

    @rule(slot=st.sampled_from(slots))
    def kill(self, slot: str) -> None:
        self.world[slot] = Sight.NOBODY

    @rule(count=st.integers(1, 3))
    def scale(self, count: int) -> None:
        self.wanted = set(self.slots[:count])
        self.keeper.want(self.wanted)

    @rule()
    def in_peace_every_wanted_slot_serves_in_the_end_and_no_other(self) -> None:
        for _ in range(int(3 * (START_S + LONGEST_PAUSE_S) / PATIENCE_S)):
            self.look(PATIENCE_S, obey=True)
            for slot, sight in self.world.items():
                if sight is Sight.STARTING:
                    self.world[slot] = Sight.SERVING
                if sight in (Sight.SILENT, Sight.LEAVING):
                    self.world[slot] = Sight.NOBODY
        serving = {slot for slot, sight in self.world.items() if sight is Sight.SERVING}
        assert serving == self.wanted
        shown = self.keeper.states(self.now)
        assert {slot: state.phase for slot, state in shown.items()} == dict.fromkeys(
            self.wanted, Phase.RUNNING
        )
        assert not any(state.deaths for state in shown.values())

    @invariant()
    def what_is_shown_makes_sense(self) -> None:
        for state in self.keeper.states(self.now).values():
            assert 0 <= state.wait_s <= LONGEST_PAUSE_S
            if state.phase is Phase.CRASH_LOOP:
                assert state.deaths >= CRASH_LOOP_DEATHS
                assert state.last_error


Cluster.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestCluster = Cluster.TestCase
