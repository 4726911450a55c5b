"""The queue that tenants share: fair by weight in tokens, ordered within a tenant, bounded."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.admission.fair_queue import QUANTUM_TOKENS, Entry, FairQueue

WEIGHTS = {"a": 1.0, "b": 2.0, "c": 0.01}
BIGGEST = 5000


@dataclass(frozen=True, slots=True, eq=False)
class Numbered(Entry):
    item: int


def entry(tenant: str, tokens: int, order: float = 0.0, item: int = 0) -> Numbered:
    return Numbered(tenant, order, tokens, item)


def drain(queue: FairQueue[Numbered]) -> list[Numbered]:
    return [queue.pop() for _ in range(len(queue))]


def test_an_empty_queue() -> None:
    queue: FairQueue[Numbered] = FairQueue(WEIGHTS, 4)
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_one_tenants_requests_leave_by_order_and_then_as_they_came() -> None:
    queue: FairQueue[Numbered] = FairQueue(WEIGHTS, 9)
    for item, order in enumerate([5.0, 1.0, 5.0, 0.0, 1.0]):
        queue.push(entry("a", 10, order, item))
    assert [gone.item for gone in drain(queue)] == [3, 1, 4, 0, 2]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    st.lists(st.integers(1, BIGGEST), min_size=40, max_size=60),
    st.lists(st.integers(1, BIGGEST), min_size=40, max_size=60),
    st.floats(0.2, 5.0),
    st.floats(0.2, 5.0),
)
def test_shares_follow_the_weights(
    first: list[int], second: list[int], weight_a: float, weight_b: float
) -> None:
    """While both wait, what each got for its weight differs by a quantum and one request each.

    The bound is that of the paper's theorem on the fairness measure.
    """
    queue: FairQueue[Numbered] = FairQueue({"a": weight_a, "b": weight_b}, 1000)
    for tokens in first:
        queue.push(entry("a", tokens))
    for tokens in second:
        queue.push(entry("b", tokens))
    served = {"a": 0.0, "b": 0.0}
    bound = QUANTUM_TOKENS + BIGGEST / weight_a + BIGGEST / weight_b
    while queue.waiting("a") and queue.waiting("b"):
        gone = queue.pop()
        served[gone.tenant] += gone.tokens
        difference = abs(served["a"] / weight_a - served["b"] / weight_b)
        assert difference <= bound + 1e-6


def test_tokens_are_shared_and_not_requests() -> None:
    """A tenant whose requests cost ten times as much gets a tenth of the requests."""
    queue: FairQueue[Numbered] = FairQueue({"big": 1.0, "small": 1.0}, 1000)
    for _ in range(200):
        queue.push(entry("big", 1000))
        queue.push(entry("small", 100))
    gone = [queue.pop().tenant for _ in range(110)]
    assert 8 <= gone.count("big") <= 12


def test_a_late_tenant_has_no_credit_and_no_debt() -> None:
    queue: FairQueue[Numbered] = FairQueue({"a": 1.0, "b": 1.0}, 1000)
    for _ in range(50):
        queue.push(entry("a", QUANTUM_TOKENS))
    for _ in range(25):
        queue.pop()
    for _ in range(25):
        queue.push(entry("b", QUANTUM_TOKENS))
    gone = [queue.pop().tenant for _ in range(20)]
    assert 9 <= gone.count("b") <= 11


def test_a_light_tenant_with_a_huge_request_gets_its_turn() -> None:
    queue: FairQueue[Numbered] = FairQueue(WEIGHTS, 10)
    queue.push(entry("c", 1_000_000, item=7))
    queue.push(entry("a", 1))
    assert {gone.item for gone in drain(queue)} == {0, 7}


def test_a_full_queue_takes_room_from_the_tenant_with_most() -> None:
    queue: FairQueue[Numbered] = FairQueue({"flood": 1.0, "few": 1.0}, 3)
    for item in range(3):
        assert queue.push(entry("flood", 100, float(item), item)) is None
    mine = entry("flood", 100, 9.0)
    assert queue.push(mine) is mine
    assert not queue.has_place(entry("flood", 1, 9.0))
    assert queue.has_place(entry("flood", 1, -1.0))
    assert queue.has_place(entry("few", 1, 9.0))
    gone = queue.push(entry("few", 100, 9.0))
    assert gone is not None
    assert (gone.tenant, gone.item) == ("flood", 2)
    # An earlier one of its own pushes out its last.
    gone = queue.push(entry("flood", 100, -1.0, 8))
    assert gone is not None
    assert (gone.tenant, gone.item) == ("flood", 1)
    assert len(queue) == 3


def test_a_weight_of_two_may_hold_twice_as_much() -> None:
    queue: FairQueue[Numbered] = FairQueue({"two": 2.0, "one": 1.0}, 3)
    queue.push(entry("two", 100))
    queue.push(entry("two", 100))
    queue.push(entry("one", 100))
    refused = entry("one", 100)
    assert queue.push(refused) is refused


def test_what_is_ahead_of_a_newcomer() -> None:
    queue: FairQueue[Numbered] = FairQueue({"a": 1.0, "b": 1.0}, 99)
    waiting = [entry("a", 1000, 5.0) for _ in range(10)]
    for one in waiting:
        queue.push(one)
    assert queue.ahead(entry("a", 100, 5.0)) == waiting
    assert queue.ahead(entry("a", 100, 4.0)) == []
    # Another tenant waits for its own weight's worth alone.
    assert queue.ahead(entry("b", 100, 5.0)) == []
    assert queue.ahead(entry("b", 2500, 5.0)) == waiting[:2]


class Machine(RuleBasedStateMachine):
    """Any sequence of calls: nothing is lost, nothing comes twice, the bound holds."""

    LIMIT = 6

    def __init__(self) -> None:
        super().__init__()
        self.queue: FairQueue[Numbered] = FairQueue(WEIGHTS, self.LIMIT)
        self.inside: set[Numbered] = set()

    @rule(tenant=st.sampled_from("abc"), tokens=st.integers(1, BIGGEST), order=st.floats(-9.0, 9.0))
    def push(self, tenant: str, tokens: int, order: float) -> None:
        new = entry(tenant, tokens, order)
        victim = self.queue.push(new)
        assert (victim is not None) is (len(self.inside) == self.LIMIT)
        self.inside.add(new)
        if victim is not None:
            self.inside.remove(victim)

    @precondition(lambda self: self.inside)
    @rule()
    def pop(self) -> None:
        shown = self.queue.peek()
        gone = self.queue.pop()
        assert gone is shown
        self.inside.remove(gone)
        mates = [other for other in self.inside if other.tenant == gone.tenant]
        assert all(gone.order <= other.order for other in mates)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        gone = data.draw(st.sampled_from(sorted(self.inside, key=lambda e: (e.order, e.tokens))))
        self.queue.remove(gone)
        self.inside.remove(gone)

    @invariant()
    def counts(self) -> None:
        assert len(self.queue) == len(self.inside) <= self.LIMIT
        assert set(self.queue) == self.inside
        assert self.queue.tokens == sum(each.tokens for each in self.inside)


TestMachine = Machine.TestCase
TestMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True
)


def test_an_entry_that_was_sent_in_vain_has_its_place_and_its_tokens_again() -> None:
    queue: FairQueue[Numbered] = FairQueue(WEIGHTS, 3)
    for item in range(3):
        queue.push(entry("a", 400, float(item), item))
    first, second = queue.pop(), queue.pop()
    queue.put_back(second)
    queue.put_back(first)
    assert queue.waiting("a") == 3
    assert [gone.item for gone in drain(queue)] == [0, 1, 2]
    assert not len(queue)


def test_blocked_entries_are_passed_over_and_keep_their_places() -> None:
    queue: FairQueue[Numbered] = FairQueue(WEIGHTS, 9)
    for item, tenant in enumerate("abab"):
        queue.push(entry(tenant, 900, float(item), item))

    def is_blocked(one: Numbered) -> bool:
        return one.item in (0, 1, 3)

    assert queue.pop(is_blocked).item == 2
    assert queue.peek(is_blocked) is None
    assert {gone.item for gone in drain(queue)} == {0, 1, 3}


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=5, max_size=40))
def test_equal_entries_leave_as_they_came_however_often_they_return(
    sent: list[tuple[str, int]],
) -> None:
    queue: FairQueue[Numbered] = FairQueue({"a": 1.0, "b": 1.0}, 100)
    for item, (tenant, _) in enumerate(sent):
        queue.push(entry(tenant, 100, float(item), item))
    returns = dict(enumerate(times for _, times in sent))
    left: list[Numbered] = []
    while len(queue):
        one = queue.pop()
        if returns[one.item]:
            returns[one.item] -= 1
            queue.put_back(one)
        else:
            left.append(one)
    for tenant in "ab":
        own = [one.item for one in left if one.tenant == tenant]
        assert own == sorted(own)
