"""A model check of the handoff: the real code of both ends in a world where anything goes wrong.

Hypothesis chooses what is asked and what breaks, and when; ``world.World`` says what may never be.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.unit.handoff_model.network import DATA, Fault, Strike
from tests.unit.handoff_model.router import OK
from tests.unit.handoff_model.world import PREFILLS, SLOTS, World

Case = TypeVar("Case")

TRANSPORTS = (("shm",), ("grpc",))
SHM_AT_ONCE = (("shm",), pytest.param(("grpc",), marks=pytest.mark.long))
SLOT = st.sampled_from(sorted(SLOTS))
MILLISECONDS = st.sampled_from((1, 2, 3, 5, 8, 20, 100, 600, 1500, 4000))

_ANY = tuple(Fault)
_CALLS = tuple(fault for fault in Fault if fault is not Fault.FLIPPED)
"""A call has no checksum of its own: TCP's and TLS's must do."""
LANES = {
    "Reserve>": _CALLS,
    "Reserve<": _CALLS,
    "Commit>": _CALLS,
    "Commit<": _CALLS,
    "Abort>": _CALLS,
    "Abort<": _CALLS,
    "Error<": _CALLS,
    "Transfer>": _ANY,
    "Transfer<": _ANY,
    DATA: (*_ANY, Fault.FLIPPED, Fault.FLIPPED, Fault.LATE, Fault.LATE),
}
"""What can become of the messages of each lane. Streams are worse off here than TCP leaves them."""
MAX_SPARED = {"Transfer>": 8, "Transfer<": 8, DATA: 12}
"""How many messages may pass before a fault strikes; a stream that never opens teaches little."""


def strikes_of(lane: str, fault: Fault) -> st.SearchStrategy[tuple[str, Strike]]:
    strikes = st.builds(
        Strike,
        fault=st.just(fault),
        amount=st.integers(0, 2000),
        spared=st.integers(0, MAX_SPARED.get(lane, 1)),
    )
    return st.tuples(st.just(lane), strikes)


STRIKES = st.sampled_from(
    [(lane, fault) for lane, faults in LANES.items() for fault in faults]
).flatmap(lambda strike: strikes_of(*strike))


@dataclass(frozen=True)
class Order:
    """A request to come. Prompts of a family share their first tokens: blocks are pinned."""

    prefill: str
    family: int
    shared: int
    own: int
    max_tokens: int
    deadline_s: float


ORDERS = st.builds(
    Order,
    prefill=st.sampled_from(PREFILLS),
    family=st.integers(0, 1),
    shared=st.integers(0, 12),
    own=st.integers(1, 12),
    max_tokens=st.sampled_from((2, 5, 12, 1)),
    deadline_s=st.sampled_from((3.0, 6.0, 0.5)),
)


class HandoffMachine(RuleBasedStateMachine):
    """Every rule asks for something, breaks something, or lets time pass."""

    @initialize(
        transports=st.sampled_from(TRANSPORTS),
        orders=st.lists(ORDERS, min_size=1, max_size=4),
        strikes=st.lists(STRIKES, max_size=2),
        turns=st.integers(0, 200),
    )
    def build(
        self,
        transports: tuple[str, ...],
        orders: list[Order],
        strikes: list[tuple[str, Strike]],
        turns: int,
    ) -> None:
        """A world that is busy."""
        self.world = World(transports)
        self.begin_many(orders, strikes)
        self.turn(turns)

    @rule(
        orders=st.lists(ORDERS, min_size=1, max_size=4),
        strikes=st.lists(STRIKES, max_size=1),
        turns=st.integers(0, 100),
    )
    def begin(self, orders: list[Order], strikes: list[tuple[str, Strike]], turns: int) -> None:
        """Several requests come at once."""
        self.begin_many(orders, strikes)
        self.turn(turns)

    def begin_many(self, orders: list[Order], strikes: list[tuple[str, Strike]]) -> None:
        for order in orders:
            number = len(self.world.router.requests)
            tokens = [order.family, *range(2, 2 + order.shared), *([100 + number] * order.own)]
            self.world.begin(order.prefill, "decode-0", tokens, order.max_tokens, order.deadline_s)
        self.strike(strikes)

    @precondition(lambda self: self.world.router.requests)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        requests = self.world.router.requests
        name = data.draw(st.sampled_from(sorted(requests)))
        self.world.router.abandon(requests[name])

    @rule(milliseconds=MILLISECONDS)
    def wait(self, milliseconds: int) -> None:
        self.world.time.advance(milliseconds / 1000)

    @rule(count=st.integers(1, 30))
    def go_on(self, count: int) -> None:
        self.turn(count)

    def turn(self, count: int) -> None:
        """The next few things happen, whenever that is."""
        self.world.time.turn(count)

    @rule(strikes=st.lists(STRIKES, min_size=1, max_size=2), turns=st.integers(0, 30))
    def trouble(self, strikes: list[tuple[str, Strike]], turns: int) -> None:
        self.strike(strikes)
        self.turn(turns)

    def strike(self, strikes: list[tuple[str, Strike]]) -> None:
        """The next messages of some lanes are not what was sent."""
        for lane, strike in strikes:
            self.world.network.faults[lane].append(strike)

    @rule(lane=st.sampled_from(sorted(LANES)), milliseconds=st.sampled_from((0, 3, 10, 50, 700)))
    def slow_down(self, lane: str, milliseconds: int) -> None:
        self.world.network.slow[lane] = milliseconds / 1000

    @rule(slot=SLOT)
    def cut(self, slot: str) -> None:
        self.world.network.cut(self.world.workers[slot])

    @rule(slot=SLOT)
    def freeze(self, slot: str) -> None:
        self.world.workers[slot].freeze()

    @rule(slot=SLOT)
    def wake(self, slot: str) -> None:
        self.world.workers[slot].wake()

    @rule(slot=SLOT)
    def kill(self, slot: str) -> None:
        self.world.kill(slot)

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            self.world.settle()
        finally:
            self.world.close()


def run_world(transports: tuple[str, ...], trouble: Callable[[World], None]) -> None:
    """Three requests that share a prefix, which one before them left, and something goes wrong."""
    world = World(transports)
    try:
        begin_three(world)
        trouble(world)
        for _ in range(20):
            world.time.turn(20)
            world.check()
        world.settle()
    finally:
        world.close()


def begin_three(world: World, deadline_s: float = 4.0) -> None:
    world.begin("prefill-1", "decode-0", [1, *range(2, 10)], 2, deadline_s)
    world.time.advance(0.2)
    for number in range(3):
        tokens = [1, *range(2, 2 + 7 * number), *([100 + number] * 7)]
        world.begin(PREFILLS[number % 2], "decode-0", tokens, 3, deadline_s)


def strikes(amounts: tuple[int, ...], max_spared: int) -> Iterator[tuple[str, Strike]]:
    """Every fault, at each of the first messages of its lane."""
    for lane, faults in LANES.items():
        for fault in dict.fromkeys(faults):
            for spared in range(min(max_spared, 3 * MAX_SPARED.get(lane, 1))):
                for amount in amounts:
                    yield lane, Strike(fault, amount, spared)


def stop(slot: str, how: str, turns: int, world: World) -> None:
    """A worker is killed, frozen or cut off after some turns."""
    world.time.turn(turns)
    if how == "kill":
        dead = world.workers[slot].name
        # The routers' aborts would do as well.
        world.network.faults["Abort>"].extend([Strike(Fault.LOST, 0)] * 3)
        world.kill(slot)
        world.time.advance(SOON_S)
        tickets = world.workers["decode-0"].receiver.book
        left = [ticket for ticket in tickets if ticket.writer == dead and not ticket.is_complete]
        assert not left, "a dead writer's tickets wait for their leases"
    elif how == "cut":
        world.network.cut(world.workers[slot])
    else:
        world.workers[slot].freeze()
        world.time.advance(FREEZES[how])
        world.check()
        world.workers[slot].wake()


SOON_S = 0.05
"""A few round trips."""
FREEZES = {"freeze": 0.03, "freeze long": 2.5}
"""Shorter than every deadline, and longer than a lease. Seconds."""


def share_of(transports: tuple[str, ...], cases: Iterable[Case]) -> list[Case]:
    """Each case is dealt to one of the transports: for quick tests. Long ones run all on each."""
    dealt = list(cases)
    random.Random(7).shuffle(dealt)
    return dealt[TRANSPORTS.index(transports) :: len(TRANSPORTS)]


def run_strikes(transports: tuple[str, ...], cases: Iterable[tuple[str, Strike]]) -> None:
    for lane, strike in cases:
        run_strike(transports, lane, strike)


def run_strike(transports: tuple[str, ...], lane: str, strike: Strike) -> None:
    try:
        run_world(transports, lambda world: world.network.faults[lane].append(strike))
    except BaseException as error:
        error.add_note(f"{lane} {strike}")
        raise


def stops(every: int) -> Iterator[tuple[str, str, int]]:
    """Every worker, every way in which it stops, after this number of turns and its multiples."""
    return itertools.product(SLOTS, ("kill", "cut", *FREEZES), range(0, 240, every))


def run_stops(transports: tuple[str, ...], cases: Iterable[tuple[str, str, int]]) -> None:
    for slot, how, turns in cases:
        try:
            run_world(transports, partial(stop, slot, how, turns))
        except BaseException as error:
            error.add_note(f"{how} {slot} after {turns} turns")
            raise


@pytest.mark.parametrize("transports", TRANSPORTS)
@pytest.mark.parametrize("slot", ["prefill-0", "decode-0"])
def test_a_worker_that_waits_for_a_frozen_one_recovers_soon(
    slot: str, transports: tuple[str, ...]
) -> None:
    for turns in range(0, 120, 8):
        world = World(transports)
        try:
            begin_three(world, 60.0)
            world.time.turn(turns)
            world.workers[slot].freeze()
            world.time.advance(5.0)
            for other in set(SLOTS) - {slot}:
                world.workers[other].check_idle()
            world.settle()
        finally:
            world.close()


@pytest.mark.parametrize("transports", SHM_AT_ONCE)
def test_one_message_goes_wrong(transports: tuple[str, ...]) -> None:
    run_strikes(transports, share_of(transports, strikes((700,), 1)))


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_one_worker_stops(transports: tuple[str, ...]) -> None:
    run_stops(transports, share_of(transports, stops(60)))


def leave(number: int, turns: int, lost: int, world: World) -> None:
    """A client leaves after some turns, and some of the aborts that follow are lost."""
    world.time.turn(turns)
    world.network.faults["Abort>"].extend([Strike(Fault.LOST, 0)] * lost)
    world.router.abandon(world.router.requests[f"request-{number + 1}"])


def departures(every: int) -> Iterator[tuple[int, int, int]]:
    """How many aborts are lost, which client leaves, and after how many turns."""
    return itertools.product((0, 2), range(3), range(0, 240, every))


def run_abandoned(transports: tuple[str, ...], cases: Iterable[tuple[int, int, int]]) -> None:
    for lost, number, turns in cases:
        try:
            run_world(transports, partial(leave, number, turns, lost))
        except BaseException as error:
            error.add_note(f"request {number} after {turns} turns, {lost} aborts lost")
            raise


@pytest.mark.parametrize("transports", SHM_AT_ONCE)
def test_a_client_leaves(transports: tuple[str, ...]) -> None:
    run_abandoned(transports, share_of(transports, departures(25)))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_a_client_leaves_at_any_step(transports: tuple[str, ...]) -> None:
    run_abandoned(transports, departures(1))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_any_message_goes_wrong(transports: tuple[str, ...]) -> None:
    run_strikes(transports, strikes((3, 50, 133, 700, 1501), 24))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_one_worker_stops_at_any_step(transports: tuple[str, ...]) -> None:
    run_stops(transports, stops(1))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("transports", TRANSPORTS)
def test_any_bit_of_an_announcement_is_wrong(transports: tuple[str, ...]) -> None:
    for spared in (1, 2, 3):
        for bit in range(560):
            run_strike(transports, "Transfer>", Strike(Fault.FLIPPED, bit, spared))


def run(examples: int, steps: int, *, derandomize: bool) -> None:
    run_state_machine_as_test(
        HandoffMachine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            deadline=None,
            derandomize=derandomize,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_whatever_breaks_nothing_is_lost_or_spoilt() -> None:
    run(25, 40, derandomize=True)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_whatever_breaks_nothing_is_lost_or_spoilt_at_length() -> None:
    run(3000, 60, derandomize=False)


@pytest.mark.parametrize("transports", TRANSPORTS)
def test_where_nothing_breaks_every_request_is_answered(transports: tuple[str, ...]) -> None:
    world = World(transports)
    try:
        requests = []
        for number in range(8):
            tokens = [number % 3, *range(1, 6 + number)]
            requests.append(world.begin(PREFILLS[number % 2], "decode-0", tokens, 1 + number, 8.0))
            world.time.advance(0.003)
            world.check()
        world.settle()
        assert [request.outcome for request in requests] == [OK] * len(requests)
    finally:
        world.close()
