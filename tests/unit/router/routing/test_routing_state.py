"""The account of what was promised."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.policies import make_policy
from router.routing.policy import ClassRoute, RouteRequest, RouteSettings
from router.routing.routing_state import EXPECTED_MS, ExpectedBlocks, RoutingState
from tests.support.router.workers import BLOCK, list_worker, record


def routing(local: bool = False) -> RoutingState:
    route = ClassRoute("always" if local else "never")
    made = RoutingState(make_policy("predictive", RouteSettings(default=route)), BLOCK)
    for slot in ("p-0", "d-0"):
        list_worker(made.table, record(slot))
    return made


@pytest.mark.parametrize("local", [False, True])
def test_a_promise_is_kept_account_of_once(*, local: bool) -> None:
    made = routing(local)
    table = made.table
    hashes = [bytes([n]) * 16 for n in range(6)]
    request = RouteRequest(100)
    decision = made.decide(request, hashes, {}, 1.0)
    assert table.queue_ms(1000.0).max() == 0, "nothing is promised by deciding"
    promise = made.promise(decision, request, hashes, 1.0)
    p, d = table.row(decision.prefill), table.row("d-0")
    assert p is not None
    assert d is not None
    assert (p == d) == local
    assert table.queue_ms(1000.0)[p] == pytest.approx(decision.prefill_ms)
    assert (table.sequences[d], table.context_tokens[d]) == (1, 100)
    assert table.available_blocks[d] == 4000 - 7
    again = made.decide(RouteRequest(101), [*hashes, bytes([9]) * 16], {}, 1.0)
    assert again.uncached_tokens == 5, "its blocks are expected"
    for _ in range(2):
        promise.computed(1.2, computed_tokens=100, compute_ms=60.0)
        assert table.queue_ms(1200.0)[p] == 0
        assert table.sequences[d] == 1
        assert table.available_blocks[d] == 4000
    for _ in range(2):
        promise.ended(1.3)
        assert table.sequences[d] == table.context_tokens[d] == 0


def test_a_request_that_ends_early_gives_everything_back() -> None:
    made = routing()
    request = RouteRequest(100)
    promise = made.promise(made.decide(request, (), {}, 0.0), request, (), 0.0)
    promise.ended(0.1)
    assert made.table.queue_ms(100.0).max() == 0
    assert made.table.sequences.max() == 0
    assert made.table.promised_blocks.max() == 0


@pytest.mark.parametrize("local", [False, True])
def test_what_prefill_workers_take_is_counted_for_the_autoscaler(*, local: bool) -> None:
    made = routing(local)
    request = RouteRequest(100)
    for computed, milliseconds in ((60, 80.0), (0, 0.0)):
        promise = made.promise(made.decide(request, (), {}, 0.0), request, (), 0.0)
        promise.computed(0.1, computed_tokens=computed, compute_ms=milliseconds)
        promise.ended(0.2)
    counted = (made.traffic.prefilled_tokens, made.traffic.prefill_s)
    assert counted == ((0, 0) if local else (100, pytest.approx(0.08)))


def test_it_learns_from_reports() -> None:
    made = routing()
    before = made.decide(RouteRequest(1000), (), {}, 0.0)
    for number in range(300):
        tokens = 200 + number
        request = RouteRequest(tokens)
        promise = made.promise(made.decide(request, (), {}, 0.0), request, (), 0.0)
        promise.computed(0.0, computed_tokens=tokens, compute_ms=3.0 * tokens)
        promise.committed(pinned_blocks=0, transfer_ms=40.0)
        promise.ended(0.0)
    after = made.decide(RouteRequest(1000), (), {}, 0.0)
    assert before.prefill_ms < 700
    assert after.prefill_ms == pytest.approx(3000.0, rel=0.1)
    assert after.ttft_ms - after.prefill_ms == pytest.approx(40.0, rel=0.1)


def test_a_worker_that_left_is_forgotten() -> None:
    made = routing()
    request = RouteRequest(100)
    promise = made.promise(made.decide(request, (), {}, 0.0), request, (), 0.0)
    made.remove("d-0")
    promise.computed(0.1, computed_tokens=100, compute_ms=60.0)
    promise.ended(0.1)
    list_worker(made.table, record("d-0"))
    row = made.table.row("d-0")
    assert made.table.sequences[row] == 0


A, B, C, D, X, Y, Z = (bytes([n]) * 16 for n in range(7))


def test_what_a_decision_creates_counts_until_it_expires() -> None:
    expected = ExpectedBlocks()
    expected.expect([A, B, C], "p", 0.0)
    assert expected.joined({}, [A, B, X], 1.0) == {"p": 2}
    assert expected.joined({"q": 1}, [A, B, C, D], EXPECTED_MS - 1) == {"p": 3, "q": 1}
    assert expected.joined({"q": 1}, [A, B, C], EXPECTED_MS) == {"q": 1}
    assert len(expected) == 0


def test_the_time_begins_with_the_end_of_the_computing() -> None:
    expected = ExpectedBlocks()
    expected.expect([A], "p", 0.0, wait=5000.0)
    expected.expect([B], "q", 0.0)
    assert expected.joined({}, [B], EXPECTED_MS) == {}, "a later one must not wait for an earlier"
    assert expected.joined({}, [A], 6999.0) == {"p": 1}
    assert expected.joined({}, [A], 7000.0) == {}


def test_the_index_is_never_lowered() -> None:
    expected = ExpectedBlocks()
    expected.expect([A], "p", 0.0)
    held = {"p": 2}
    assert expected.joined(held, [A, B], 1.0) == {"p": 2}
    assert held == {"p": 2}


CHAINS = [[A, B, C, D], [A, B, X], [A, Y], [Z]]
"""Of chained hashes: each stands for all that comes before it too."""


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3), st.integers(1, 4), st.sampled_from("pqr"), st.integers(0, 900)
        ),
        max_size=25,
    ),
    st.integers(0, 3),
)
def test_it_equals_a_plain_list_of_notes(
    notes: list[tuple[int, int, str, int]], asked: int
) -> None:
    expected, now = ExpectedBlocks(), 0.0
    plain: list[tuple[float, str, list[bytes]]] = []
    for chain, length, worker, passes in notes:
        now += passes
        expected.expect(CHAINS[chain][:length], worker, now)
        plain.append((now + EXPECTED_MS, worker, CHAINS[chain][:length]))
        depths: dict[str, int] = {}
        for until, name, hashes in plain:
            depth = 0
            for mine, theirs in zip(CHAINS[asked], hashes, strict=False):
                if mine != theirs:
                    break
                depth += 1
            if until > now and depth:
                depths[name] = max(depth, depths.get(name, 0))
        assert expected.joined({}, CHAINS[asked], now) == depths


def test_what_is_noted_twice_for_one_moment_expires_once() -> None:
    expected = ExpectedBlocks()
    for hashes in ([A, B], [A, B, C], [A, A]):
        expected.expect(hashes, "p", 0.0)
    assert expected.joined({}, [A, B, C], 1.0) == {"p": 3}
    assert expected.joined({}, [A, B, C], EXPECTED_MS) == {}
    assert len(expected) == 0
