"""Block hashes: chained, keyed, and the same however they were computed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.hashing import HASH_BYTES, block_hashes, hash_key, last_hashes

TOKENS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 3), max_size=40)
KEY = hash_key("model")
quick = settings(max_examples=100, deadline=None, derandomize=True)


@quick
@given(TOKENS, st.integers(1, 8))
def test_one_hash_for_each_full_block(tokens: list[int], size: int) -> None:
    hashes = block_hashes(tokens, size, KEY)
    assert len(hashes) == len(tokens) // size
    assert len(set(hashes)) == len(hashes)
    assert all(len(digest) == HASH_BYTES for digest in hashes)


@quick
@given(TOKENS, st.integers(1, 8), st.data())
def test_known_hashes_are_continued(tokens: list[int], size: int, data: st.DataObject) -> None:
    whole = block_hashes(tokens, size, KEY)
    known = data.draw(st.integers(0, len(whole)))
    assert block_hashes(tokens, size, KEY, whole[:known]) == whole


@quick
@given(TOKENS, TOKENS, st.integers(1, 8))
def test_hashes_agree_exactly_as_far_as_the_tokens(
    some: list[int], others: list[int], size: int
) -> None:
    same = next((i for i, (a, b) in enumerate(zip(some, others, strict=False)) if a != b), None)
    same = min(len(some), len(others)) if same is None else same
    pairs = zip(block_hashes(some, size, KEY), block_hashes(others, size, KEY), strict=False)
    for index, (one, other) in enumerate(pairs):
        assert (one == other) is ((index + 1) * size <= same)


@quick
@given(TOKENS.filter(lambda tokens: len(tokens) > 3), st.integers(0, 30), st.integers(1, 3))
def test_a_block_stands_for_all_that_comes_before_it(
    tokens: list[int], where: int, size: int
) -> None:
    where %= len(tokens)
    changed = [*tokens]
    changed[where] ^= 1
    pairs = zip(block_hashes(tokens, size, KEY), block_hashes(changed, size, KEY), strict=True)
    for index, (one, other) in enumerate(pairs):
        assert (one == other) is (index < where // size)


@quick
@given(st.text(max_size=90), st.text(max_size=90), st.binary(max_size=40), st.binary(max_size=40))
def test_models_and_tenants_share_nothing(one: str, other: str, salt: bytes, pepper: bytes) -> None:
    first, second = hash_key(one, salt), hash_key(other, pepper)
    assert len(first) == 32
    assert (first == second) is ((one, salt) == (other, pepper))
    if first != second:
        assert block_hashes([1, 2], 2, first) != block_hashes([1, 2], 2, second)


def test_long_fingerprints_that_begin_alike_differ() -> None:
    assert hash_key("x" * 64 + "a") != hash_key("x" * 64 + "b")


@quick
@given(st.lists(st.integers(0, 9), max_size=40), st.integers(1, 4), st.integers(1, 4))
def test_a_blocks_hash_is_that_of_its_last_hash_block(
    tokens: list[int], size: int, per_block: int
) -> None:
    hashes = block_hashes(tokens, size, KEY)
    found = last_hashes(hashes, per_block)
    assert len(found) == len(tokens) // (size * per_block)
    for index, digest in enumerate(found):
        assert digest == hashes[(index + 1) * per_block - 1]


def test_hashes_never_change() -> None:
    """Workers and routers of one cluster may be of different versions."""
    assert block_hashes([1, 2, 3, 4], 2, bytes(32)) == [
        bytes.fromhex("ace5134ed4d14e184ad966e0eee78754"),
        bytes.fromhex("3c0f706c3c18532825d6a1b315b6b2e8"),
    ]
