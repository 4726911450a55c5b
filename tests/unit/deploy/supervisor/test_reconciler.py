"""What becomes of a worker's slot, in a world without processes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from deploy.supervisor.death import DeathCause
from deploy.supervisor.reconciler import (
    CRASH_LOOP_DEATHS,
    FIRST_PAUSE_S,
    HEALTHY_S,
    LEAVE_S,
    LONGEST_PAUSE_S,
    OUTDATED,
    PATIENCE_S,
    SETTLED_S,
    SILENCE_S,
    UNPLACED,
    Observed,
    Phase,
    Reconciler,
    SlotAction,
    WantedSlots,
    pause_after,
    split,
)

SLOT = "decode-0"
LOOK_S = 0.5
DRAIN_S = 30.0
START_S = 600.0
POOLS = {"prefill": 1, "decode": 2}
AT_FIRST = {"prefill-0", "decode-0", "decode-1"}


def keeper_of(*slots: str) -> Reconciler:
    reconciler = Reconciler(DRAIN_S, START_S)
    reconciler.want(slots)
    return reconciler


def die(reconciler: Reconciler, now: float, error: str = "boom") -> None:
    """A life begins, and ends at once."""
    reconciler.observe(SLOT, Observed.STARTING, now)
    reconciler.observe(SLOT, Observed.ABSENT, now, error)


def look(reconciler: Reconciler, observed: Observed, now: float) -> dict[str, SlotAction]:
    reconciler.observe(SLOT, observed, now)
    return reconciler.decide(now)


def test_an_empty_slot_is_filled_at_once_and_only_once() -> None:
    reconciler = keeper_of(SLOT)
    reconciler.observe(SLOT, Observed.ABSENT, 0.0)
    assert reconciler.decide(0.0) == {SLOT: SlotAction.START}
    assert reconciler.decide(LOOK_S) == {}
    assert reconciler.states(LOOK_S)[SLOT].phase is Phase.STARTING


def test_an_order_without_effect_is_given_again() -> None:
    reconciler = keeper_of(SLOT)
    reconciler.observe(SLOT, Observed.ABSENT, 0.0)
    reconciler.decide(0.0)
    reconciler.failed(SLOT, "Ray is away")
    assert reconciler.decide(PATIENCE_S - 0.1) == {}
    assert reconciler.decide(PATIENCE_S) == {SLOT: SlotAction.START}
    state = reconciler.states(PATIENCE_S)[SLOT]
    assert (state.deaths, state.last_error) == (0, "Ray is away")


def test_a_process_that_dies_before_the_first_look_has_died() -> None:
    reconciler = keeper_of(SLOT)
    now = 0.0
    for deaths in range(1, CRASH_LOOP_DEATHS + 1):
        assert not reconciler.observe(SLOT, Observed.ABSENT, now)
        assert reconciler.decide(now) == {SLOT: SlotAction.START}
        reconciler.started(SLOT)
        now += LOOK_S
        assert reconciler.observe(SLOT, Observed.ABSENT, now, "cannot start")
        assert reconciler.decide(now) == {}
        state = reconciler.states(now)[SLOT]
        assert (state.deaths, state.last_error) == (deaths, "cannot start")
        now += pause_after(deaths)
    assert reconciler.states(now - LOOK_S)[SLOT].phase is Phase.CRASH_LOOP


def test_who_serves_is_left_alone_by_a_keeper_that_knows_nothing() -> None:
    reconciler = keeper_of(SLOT, "decode-1")
    for slot in (SLOT, "decode-1"):
        reconciler.observe(slot, Observed.SERVING, 5.0)
    assert reconciler.decide(5.0) == {}
    assert {state.phase for state in reconciler.states(5.0).values()} == {Phase.RUNNING}


def test_pauses_double_up_to_the_longest() -> None:
    pauses = [pause_after(deaths) for deaths in range(1, 2000)]
    assert pauses[0] == FIRST_PAUSE_S
    assert pauses[1] == 2 * FIRST_PAUSE_S
    assert pauses == sorted(pauses)
    assert pauses[-1] == LONGEST_PAUSE_S


def test_deaths_are_backed_off_from_and_become_a_crash_loop_that_says_why() -> None:
    reconciler, now = keeper_of(SLOT), 0.0
    for deaths in range(1, CRASH_LOOP_DEATHS + 1):
        die(reconciler, now, f"reason {deaths}")
        state = reconciler.states(now)[SLOT]
        assert (state.deaths, state.last_error) == (deaths, f"reason {deaths}")
        assert state.wait_s == pytest.approx(pause_after(deaths))
        looping = deaths >= CRASH_LOOP_DEATHS
        assert state.phase is (Phase.CRASH_LOOP if looping else Phase.BACKING_OFF)
        assert reconciler.decide(now + pause_after(deaths) - 0.01) == {}
        now += pause_after(deaths)
        assert reconciler.decide(now) == {SLOT: SlotAction.START}
    # The next try is shown as part of the loop until it has gone well.
    reconciler.observe(SLOT, Observed.STARTING, now)
    assert reconciler.states(now)[SLOT].phase is Phase.CRASH_LOOP
    reconciler.observe(SLOT, Observed.SERVING, now)
    assert reconciler.states(now)[SLOT].phase is Phase.RUNNING
    assert reconciler.states(now)[SLOT].deaths == CRASH_LOOP_DEATHS


def test_a_healthy_while_forgives() -> None:
    reconciler = keeper_of(SLOT)
    die(reconciler, 0.0)
    reconciler.observe(SLOT, Observed.SERVING, 1.0)
    reconciler.observe(SLOT, Observed.SERVING, 1.0 + HEALTHY_S - 0.1)
    assert reconciler.states(30.0)[SLOT].deaths == 1
    reconciler.observe(SLOT, Observed.SERVING, 1.0 + HEALTHY_S)
    state = reconciler.states(31.0)[SLOT]
    assert (state.deaths, state.last_error) == (0, "")


def test_a_long_silent_worker_is_replaced_and_one_that_wakes_in_time_is_not() -> None:
    reconciler = keeper_of(SLOT)
    reconciler.observe(SLOT, Observed.SERVING, 0.0)
    now = 1.0
    for observed in (Observed.SILENT, Observed.SERVING, Observed.SILENT):
        for _ in range(int(SILENCE_S / LOOK_S)):
            assert look(reconciler, observed, now) == {}
            now += LOOK_S
    look(reconciler, Observed.SILENT, now)
    assert look(reconciler, Observed.SILENT, now + LOOK_S) == {SLOT: SlotAction.END}
    now += SILENCE_S
    killed = DeathCause.SIGKILL
    hung = reconciler.observe(SLOT, Observed.ABSENT, now, "killed", cause=killed)
    assert hung is DeathCause.HUNG, "the supervisor has ended it"
    assert "was silent" in reconciler.states(now)[SLOT].last_error
    assert reconciler.decide(now + 1) == {SLOT: SlotAction.START}


def test_an_owner_that_stood_still_itself_ends_no_worker_for_that() -> None:
    reconciler = keeper_of(SLOT)
    reconciler.observe(SLOT, Observed.SERVING, 0.0)
    assert look(reconciler, Observed.SILENT, 1.0) == {}
    # The whole host stands still; then the worker's answer is not read yet.
    assert look(reconciler, Observed.SILENT, 1.0 + 2 * SILENCE_S) == {}
    assert look(reconciler, Observed.SILENT, 1.0 + 2 * SILENCE_S + LOOK_S) == {}
    assert look(reconciler, Observed.SERVING, 1.0 + 2 * SILENCE_S + 2 * LOOK_S) == {}


def test_who_does_not_come_to_serve_is_ended() -> None:
    reconciler = keeper_of(SLOT)
    reconciler.observe(SLOT, Observed.STARTING, 0.0)
    assert look(reconciler, Observed.STARTING, START_S - 1) == {}
    assert look(reconciler, Observed.STARTING, START_S) == {SLOT: SlotAction.END}
    assert "start_deadline_s" in reconciler.states(START_S)[SLOT].last_error


def test_a_start_may_take_as_long_as_it_reads_on() -> None:
    reconciler = keeper_of(SLOT)
    # 400 GB in 64 MiB steps, read at 0.6 GB/s, take longer than the deadline.
    seconds = int(400e9 / 0.6e9)
    assert seconds > START_S
    for now in range(seconds):
        reconciler.observe(SLOT, Observed.STARTING, now, progress=int(now * 0.6e9) >> 26)
        assert reconciler.decide(now) == {}
    stuck = int(seconds * 0.6e9) >> 26
    reconciler.observe(SLOT, Observed.STARTING, seconds, progress=stuck)
    reconciler.observe(SLOT, Observed.STARTING, seconds + START_S, progress=stuck)
    assert reconciler.decide(seconds + START_S) == {SLOT: SlotAction.END}


def test_the_wait_for_a_node_does_not_count_and_is_shown() -> None:
    reconciler = keeper_of(SLOT)
    assert look(reconciler, Observed.STARTING, 0.0) == {}
    assert look(reconciler, Observed.UNPLACED, 10.0) == {}
    assert look(reconciler, Observed.UNPLACED, 100 * START_S) == {}
    shown = reconciler.states(100 * START_S)[SLOT]
    assert (shown.phase, shown.last_error) == (Phase.STARTING, UNPLACED)
    assert look(reconciler, Observed.STARTING, 100 * START_S + 1) == {}
    assert look(reconciler, Observed.STARTING, 101 * START_S) == {}
    assert look(reconciler, Observed.STARTING, 101 * START_S + 1) == {SLOT: SlotAction.END}


def test_a_worker_that_waits_for_a_node_ends_when_it_is_not_wanted_any_more() -> None:
    reconciler = keeper_of(SLOT)
    look(reconciler, Observed.UNPLACED, 0.0)
    reconciler.want([])
    assert reconciler.decide(1.0) == {SLOT: SlotAction.END}


def test_an_unwanted_worker_is_drained_and_forgotten() -> None:
    reconciler = keeper_of(SLOT, "decode-1")
    for slot in (SLOT, "decode-1"):
        reconciler.observe(slot, Observed.SERVING, 0.0)
    reconciler.want([SLOT])
    assert reconciler.decide(1.0) == {"decode-1": SlotAction.DRAIN}
    assert reconciler.states(1.0)["decode-1"].phase is Phase.LEAVING
    reconciler.observe("decode-1", Observed.LEAVING, 1.5)
    assert reconciler.decide(1.0 + PATIENCE_S) == {}
    assert not reconciler.observe("decode-1", Observed.ABSENT, 12.0)
    assert reconciler.decide(12.0) == {}
    assert set(reconciler.states(12.0)) == {SLOT}


@pytest.mark.parametrize("observed", [Observed.SERVING, Observed.LEAVING])
def test_an_unwanted_worker_that_does_not_leave_is_ended(observed: Observed) -> None:
    reconciler = keeper_of(SLOT)
    reconciler.observe(SLOT, Observed.SERVING, 0.0)
    reconciler.want([])
    assert reconciler.decide(0.0) == {SLOT: SlotAction.DRAIN}
    reconciler.observe(SLOT, observed, 1.0)
    again = {SLOT: SlotAction.DRAIN} if observed is Observed.SERVING else {}
    assert reconciler.decide(DRAIN_S + LEAVE_S - 1) == again
    assert reconciler.decide(DRAIN_S + LEAVE_S) == {SLOT: SlotAction.END}


@pytest.mark.parametrize("observed", [Observed.STARTING, Observed.SILENT])
def test_an_unwanted_idle_worker_is_ended_at_once(observed: Observed) -> None:
    reconciler = keeper_of(SLOT)
    reconciler.observe(SLOT, observed, 0.0)
    reconciler.want([])
    assert reconciler.decide(0.0) == {SLOT: SlotAction.END}


def test_a_drained_worker_is_no_death_and_another_one_is_started_at_once() -> None:
    reconciler = keeper_of(SLOT)
    die(reconciler, 0.0)
    reconciler.observe(SLOT, Observed.SERVING, 1.0)
    reconciler.observe(SLOT, Observed.LEAVING, 2.0)
    assert reconciler.decide(2.0) == {}
    assert reconciler.states(2.0)[SLOT].phase is Phase.DRAINING
    assert not reconciler.observe(SLOT, Observed.ABSENT, 3.0, "its process has died")
    assert reconciler.decide(3.0) == {SLOT: SlotAction.START}
    state = reconciler.states(3.0)[SLOT]
    assert (state.phase, state.deaths, state.wait_s) == (Phase.STARTING, 1, 0.0)


def test_who_leaves_may_be_wanted_again_and_is_replaced() -> None:
    reconciler = keeper_of(SLOT)
    reconciler.observe(SLOT, Observed.SERVING, 0.0)
    reconciler.want([])
    reconciler.decide(0.0)
    reconciler.observe(SLOT, Observed.LEAVING, 1.0)
    reconciler.want([SLOT])
    assert reconciler.decide(2.0) == {}
    assert not reconciler.observe(SLOT, Observed.ABSENT, 3.0)
    assert reconciler.decide(3.0) == {SLOT: SlotAction.START}


def rollout(
    reconciler: Reconciler, world: dict[str, Observed], outdated: set[str], now: float
) -> dict[str, SlotAction]:
    """Observe all slots, and return the orders."""
    for slot, observed in world.items():
        reconciler.observe(slot, observed, now, outdated=slot in outdated)
    return reconciler.decide(now)


def test_outdated_workers_are_replaced_one_by_one_while_the_others_serve() -> None:
    slots = ["decode-0", "decode-1", "prefill-0"]
    reconciler, outdated, now = keeper_of(*slots), set(slots), 0.0
    world = dict.fromkeys(slots, Observed.SERVING)
    for slot in slots:
        assert rollout(reconciler, world, outdated, now) == {}
        now += SETTLED_S
        assert rollout(reconciler, world, outdated, now) == {slot: SlotAction.DRAIN}
        assert reconciler.states(now)[slot].last_error == OUTDATED
        assert rollout(reconciler, world, outdated, now + PATIENCE_S - 1) == {}
        now += PATIENCE_S
        assert rollout(reconciler, world, outdated, now) == {slot: SlotAction.DRAIN}, "it was lost"
        world[slot] = Observed.LEAVING
        for _ in range(5):
            now += PATIENCE_S
            assert rollout(reconciler, world, outdated, now) == {}
        world[slot] = Observed.ABSENT
        outdated.discard(slot)
        assert rollout(reconciler, world, outdated, now) == {slot: SlotAction.START}
        world[slot] = Observed.STARTING
        now += SETTLED_S
        assert rollout(reconciler, world, outdated, now) == {}
        world[slot] = Observed.SERVING
    for _ in range(5):
        now += PATIENCE_S
        assert rollout(reconciler, world, outdated, now) == {}
    shown = reconciler.states(now)
    assert {(one.phase, one.deaths, one.last_error) for one in shown.values()} == {
        (Phase.RUNNING, 0, "")
    }


def test_a_version_that_does_not_start_ends_one_worker() -> None:
    slots = ["decode-0", "decode-1"]
    reconciler, outdated, now = keeper_of(*slots), set(slots), 0.0
    world = dict.fromkeys(slots, Observed.SERVING)
    rollout(reconciler, world, outdated, now)
    now += SETTLED_S
    assert rollout(reconciler, world, outdated, now) == {"decode-0": SlotAction.DRAIN}
    world["decode-0"] = Observed.LEAVING
    rollout(reconciler, world, outdated, now)
    outdated.discard("decode-0")
    for _ in range(2 * CRASH_LOOP_DEATHS):
        # It even serves for a while each time.
        for observed in (Observed.ABSENT, Observed.STARTING, Observed.SERVING):
            world["decode-0"] = observed
            now += SETTLED_S + LOOK_S
            orders = rollout(reconciler, world, outdated, now)
            assert orders.get("decode-1") is None
    assert reconciler.states(now)["decode-1"].last_error == OUTDATED


def test_a_keeper_that_takes_over_repeats_no_old_advice() -> None:
    reconciler = keeper_of(SLOT)
    reconciler.remember(SLOT, 0, OUTDATED)
    reconciler.observe(SLOT, Observed.SERVING, 0.0)
    assert reconciler.states(0.0)[SLOT].last_error == ""


def test_an_earlier_keepers_memory_goes_on() -> None:
    reconciler = keeper_of(SLOT)
    reconciler.remember(SLOT, CRASH_LOOP_DEATHS, "no memory")
    reconciler.observe(SLOT, Observed.ABSENT, 0.0)
    assert reconciler.states(0.0)[SLOT].phase is Phase.CRASH_LOOP
    die(reconciler, 0.0)
    assert reconciler.decide(pause_after(CRASH_LOOP_DEATHS + 1) - 0.01) == {}


AFTER = {
    SlotAction.START: Observed.STARTING,
    SlotAction.DRAIN: Observed.LEAVING,
    SlotAction.END: Observed.ABSENT,
}
"""What becomes of a slot by an order."""


class Cluster(RuleBasedStateMachine):
    """Workers that live and die at random, a reconciler that is replaced now and then."""

    slots = tuple(f"w-{number}" for number in range(3))

    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.world = dict.fromkeys(self.slots, Observed.ABSENT)
        self.outdated: set[str] = set()
        self.wanted = set(self.slots)
        self.new_keeper()

    @rule()
    def new_keeper(self) -> None:
        """It begins with what it sees."""
        self.reconciler = keeper_of(*self.wanted)

    @rule(seconds=st.floats(0.1, 100.0), obey=st.booleans())
    def look(self, seconds: float, obey: bool) -> None:
        """Time passes; orders are carried out, or get lost."""
        self.now += seconds
        before = dict(self.world)
        known = self.reconciler.states(self.now)
        for slot, observed in self.world.items():
            if slot in known or observed is not Observed.ABSENT:
                outdated = slot in self.outdated
                self.reconciler.observe(slot, observed, self.now, outdated=outdated)
        drained = 0
        for slot, order in self.reconciler.decide(self.now).items():
            if order is SlotAction.START:
                assert slot in self.wanted
                assert self.world[slot] is Observed.ABSENT, "nobody is placed beside somebody"
                if obey:
                    self.outdated.discard(slot)
            elif order is SlotAction.END:
                assert slot not in self.wanted or self.world[slot] is not Observed.SERVING
            else:
                assert self.world[slot] is Observed.SERVING
                if slot in self.wanted:
                    assert slot in self.outdated
                    assert {before[one] for one in self.wanted} == {Observed.SERVING}
                    drained += 1
            if obey:
                self.world[slot] = AFTER[order]
        assert drained <= 1

    @rule(
        slot=st.sampled_from(slots),
        observed=st.sampled_from((Observed.SERVING, Observed.SILENT, Observed.LEAVING)),
    )
    def change(self, slot: str, observed: Observed) -> None:
        if self.world[slot] is not Observed.ABSENT:
            self.world[slot] = observed

    @rule(slot=st.sampled_from(slots), starts=st.booleans())
    def place(self, slot: str, starts: bool) -> None:
        """A node has room for a worker that starts, or has none."""
        if self.world[slot] in (Observed.STARTING, Observed.UNPLACED):
            self.world[slot] = Observed.STARTING if starts else Observed.UNPLACED

    @rule(slot=st.sampled_from(slots))
    def kill(self, slot: str) -> None:
        self.world[slot] = Observed.ABSENT

    @rule()
    def upgrade(self) -> None:
        """New workers have another version from now on."""
        living = (slot for slot, observed in self.world.items() if observed is not Observed.ABSENT)
        self.outdated = set(living)

    @rule(count=st.integers(1, 3))
    def scale(self, count: int) -> None:
        self.wanted = set(self.slots[:count])
        self.reconciler.want(self.wanted)

    @rule()
    def in_peace_every_wanted_slot_serves_in_the_end_and_no_other(self) -> None:
        for _ in range(int(3 * (START_S + LONGEST_PAUSE_S) / PATIENCE_S)):
            self.look(PATIENCE_S, obey=True)
            for slot, observed in self.world.items():
                if observed in (Observed.STARTING, Observed.UNPLACED):
                    self.world[slot] = Observed.SERVING
                if observed in (Observed.SILENT, Observed.LEAVING):
                    self.world[slot] = Observed.ABSENT
        serving = {slot for slot, observed in self.world.items() if observed is Observed.SERVING}
        assert serving == self.wanted
        assert not self.outdated & self.wanted, "all have been replaced"
        shown = self.reconciler.states(self.now)
        assert {slot: state.phase for slot, state in shown.items()} == dict.fromkeys(
            self.wanted, Phase.RUNNING
        )
        assert not any(state.deaths or state.last_error for state in shown.values())

    @invariant()
    def what_is_shown_makes_sense(self) -> None:
        for state in self.reconciler.states(self.now).values():
            assert 0 <= state.wait_s <= LONGEST_PAUSE_S
            if state.phase is Phase.CRASH_LOOP:
                assert state.deaths >= CRASH_LOOP_DEATHS
                assert state.last_error


Cluster.TestCase.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)
TestCluster = Cluster.TestCase


def test_a_pools_size_is_the_configured_one_until_an_operator_chooses() -> None:
    wanted = WantedSlots(POOLS)
    assert wanted.slots() == AT_FIRST
    assert wanted.choose({}) == {}
    assert wanted.slots() == AT_FIRST
    assert wanted.choose({"decode": 1, "unknown": 7}) == {}
    assert wanted.slots() == {"prefill-0", "decode-0"}
    assert wanted.choose({"decode": 3}) == {}
    assert wanted.slots() == AT_FIRST | {"decode-2"}


def test_what_was_chosen_is_remembered_where_it_is_lost() -> None:
    wanted = WantedSlots(POOLS)
    wanted.choose({"decode": 4, "prefill": 0})
    assert wanted.choose({"prefill": 0}) == {"decode": 4}
    assert wanted.slots() == {f"decode-{n}" for n in range(4)}


def test_a_live_worker_is_wanted_until_an_operator_changes_that() -> None:
    wanted = WantedSlots(POOLS, ["decode-3", "decode-0", "stranger-8", "supervisor"])
    assert wanted.slots() == AT_FIRST | {"decode-2", "decode-3"}
    assert wanted.choose({}) == {"decode": 4}
    assert wanted.choose({"decode": 1}) == {}
    assert wanted.slots() == {"prefill-0", "decode-0"}


@given(st.text(), st.integers(0, 10**6))
def test_names_of_slots_come_apart_again(pool: str, number: int) -> None:
    assert split(f"{pool}-{number}") == (pool, number)


def test_what_is_no_slot_has_no_pool() -> None:
    assert split("supervisor") == split("decode-") == split("decode-x") == ("", 0)
