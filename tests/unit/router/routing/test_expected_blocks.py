"""Blocks that are counted as held before the index tells of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.expected_blocks import EXPECTED_MS, ExpectedBlocks

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
