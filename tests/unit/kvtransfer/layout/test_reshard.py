"""Plans are executed on random bytes and compared with what each token's bytes must become."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from baton.errors import GeometryMismatch, HandoffError
from baton.request import GroupShape
from kvtransfer.layout.layout import SCALE_BYTES, KvLayout
from kvtransfer.layout.reshard import Slice, overlaps, plan, shards

Bytes = npt.NDArray[np.uint8]
DEGREES = (1, 2, 4, 8)
EVEN = [
    (heads, source, target)
    for heads in (1, 2, 3, 4, 8, 16)
    for source, target in itertools.product(DEGREES, DEGREES)
    if all(heads % degree == 0 or degree % heads == 0 for degree in (source, target))
]
UNEVEN = [
    (heads, source, target)
    for heads in (3, 5, 9)
    for source, target in itertools.product((1, 2, 4), (1, 2, 3, 4))
    if any(heads % degree and degree % heads for degree in (source, target))
]
PAIRS = EVEN + UNEVEN
"""(KV heads, tensor parallelism of the source, of the target)"""
DTYPES = ("float32", "bfloat16", "float16", "int8", "fp8")
SIZES = st.integers(1, 64)
NESTED = st.tuples(st.integers(1, 16), st.integers(1, 4), st.integers(1, 4))
SIZE_PAIRS = st.one_of(
    SIZES.map(lambda size: (size, size)),
    NESTED.map(lambda drawn: (drawn[0], drawn[0] * drawn[1])),
    NESTED.map(lambda drawn: (drawn[0] * drawn[1], drawn[0])),
    NESTED.map(lambda drawn: (drawn[0] * drawn[1], drawn[0] * drawn[2])),
    st.tuples(SIZES, SIZES),
)
"""Block sizes of source and target: equal, one in the other, with a common part, any."""


@dataclass(frozen=True)
class Case:
    """Two layouts of one model, and a range of tokens."""

    source: KvLayout
    target: KvLayout
    first: int
    last: int


def test_drafters_parts_are_not_planned() -> None:
    layout = KvLayout(16, 2, 2, 8, "int8", drafter=GroupShape(1, 1, 8))
    with pytest.raises(GeometryMismatch, match="it has a drafter's part"):
        plan(layout, layout, 0, 16)


@st.composite
def cases(draw: st.DrawFn, heads: int, source_ranks: int, target_ranks: int) -> Case:
    size, other = draw(SIZE_PAIRS)
    layers, dim = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    last = draw(st.integers(1, 2 * max(size, other) + 3))
    return Case(
        KvLayout(size, layers, heads, dim, dtype, source_ranks),
        KvLayout(other, layers, heads, dim, dtype, target_ranks),
        draw(st.one_of(st.just(0), st.integers(0, last))),
        last,
    )


def parts(layout: KvLayout, data: Bytes) -> tuple[Bytes, Bytes]:
    """Codes and scales [block, layer, K/V, head, slot, byte] of a rank's [block, block_bytes]."""
    shape = (len(data), layout.layers, 2, layout.kv_heads, layout.block_size)
    rows = int(np.prod(shape[1:]))
    codes = rows * layout.row_bytes
    scales = rows * SCALE_BYTES if layout.has_scales else 0
    return (
        data[:, :codes].reshape(*shape, layout.row_bytes),
        data[:, codes : codes + scales].reshape(*shape, SCALE_BYTES if scales else 0),
    )


def place(layout: KvLayout, rank: int, data: Bytes, rows: Bytes, first: int, last: int) -> None:
    """Put tokens of ``rows`` [layer, K/V, head, token, byte] into a rank's blocks, one by one."""
    codes, scales = parts(layout.of_rank(rank), data)
    assert np.shares_memory(codes, data)
    heads = layout.heads_of(rank)
    for token in range(first, last):
        block, slot = divmod(token, layout.block_size)
        row = rows[:, :, heads.start : heads.stop, token]
        codes[block, :, :, :, slot] = row[..., : layout.row_bytes]
        scales[block, :, :, :, slot] = row[..., layout.row_bytes :]


def blank(layout: KvLayout, tokens: int, random: np.random.Generator) -> list[Bytes]:
    """Blocks of random bytes [block, block_bytes] of every rank."""
    count = -(-tokens // layout.block_size)
    return [
        random.integers(0, 256, (count, layout.of_rank(rank).block_bytes), np.uint8)
        for rank in range(layout.tensor_parallel)
    ]


def execute(slices: list[Slice], source: list[Bytes], target: list[Bytes]) -> list[Bytes]:
    """Copy, and count how often each byte of the target is written."""
    written = [np.zeros_like(data) for data in target]
    for each in slices:
        assert each.length > 0
        assert min(each.source_offset, each.target_offset) >= 0
        assert each.source_offset + each.length <= source[each.source_rank].shape[1]
        assert each.target_offset + each.length <= target[each.target_rank].shape[1]
        there = slice(each.target_offset, each.target_offset + each.length)
        here = slice(each.source_offset, each.source_offset + each.length)
        read = source[each.source_rank][each.source_block, here]
        target[each.target_rank][each.target_block, there] = read
        written[each.target_rank][each.target_block, there] += 1
    return written


def whole_blocks(case: Case, rank: int, data: Bytes) -> Bytes:
    """1 in a target rank's blocks that go whole: where a source rank has the same heads, those that
    begin in the range. Padding and what follows the last token come along.
    """
    source, target = case.source, case.target
    whole = np.zeros_like(data)
    heads = target.heads_of(rank)
    alike = any(source.heads_of(each) == heads for each in range(source.tensor_parallel))
    if source.block_size == target.block_size and alike:
        whole[-(-case.first // target.block_size) :] = 1
    return whole


def check_merged(slices: list[Slice]) -> None:
    """No slice begins where another ends, at both sides."""
    starts = {replace(each, length=0) for each in slices}
    for each in slices:
        behind = replace(
            each,
            source_offset=each.source_offset + each.length,
            target_offset=each.target_offset + each.length,
            length=0,
        )
        assert behind not in starts


@pytest.mark.parametrize(("heads", "source_ranks", "target_ranks"), PAIRS)
def test_every_token_arrives_once_and_nothing_else(
    heads: int, source_ranks: int, target_ranks: int
) -> None:
    # Of its own, so that the combinations do not all try the same sizes.
    @seed(heads << 16 | source_ranks << 8 | target_ranks)
    @settings(max_examples=12, deadline=None, database=None)
    @given(cases(heads, source_ranks, target_ranks))
    def check(case: Case) -> None:
        random = np.random.default_rng(0)
        width = case.source.row_bytes + SCALE_BYTES * case.source.has_scales
        shape = (case.source.layers, 2, heads, case.last, width)
        rows = random.integers(0, 256, shape, np.uint8)
        source = blank(case.source, case.last, random)
        for rank, data in enumerate(source):
            place(case.source, rank, data, rows, 0, case.last)
        target = blank(case.target, case.last, random)
        before = [data.copy() for data in target]
        slices = plan(case.source, case.target, case.first, case.last)
        written = execute(slices, source, target)
        check_merged(slices)
        for rank, data in enumerate(target):
            expected, tokens = before[rank], np.zeros_like(data)
            place(case.target, rank, expected, rows, case.first, case.last)
            place(case.target, rank, tokens, np.ones_like(rows), case.first, case.last)
            assert (written[rank] == (tokens | whole_blocks(case, rank, data))).all()
            kept = (tokens == 1) | (written[rank] == 0)
            assert (data == expected)[kept].all()

    check()


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(SIZE_PAIRS, st.integers(0, 300), st.integers(0, 200))
def test_overlaps_are_the_tokens_in_order(sizes: tuple[int, int], first: int, count: int) -> None:
    size, other = sizes
    source, target = KvLayout(size, 1, 1, 1, "int8"), KvLayout(other, 1, 1, 1, "fp8")
    found = []
    for each in overlaps(source, target, first, first + count):
        assert each.source_slot + each.tokens <= size
        assert each.target_slot + each.tokens <= other
        for token in range(each.tokens):
            place_there = each.target_block * other + each.target_slot + token
            assert each.source_block * size + each.source_slot + token == place_there
            found.append(place_there)
    assert found == list(range(first, first + count))


@pytest.mark.parametrize("ranks", [*DEGREES, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_geometries_move_whole_blocks_from_rank_to_same_rank(dtype: str, ranks: int) -> None:
    layout = KvLayout(16, 3, 4, 8, dtype, ranks)
    expected = [
        Slice(rank, block, 0, rank, block, 0, layout.of_rank(rank).block_bytes)
        for block in (1, 2)
        for rank in range(ranks)
    ]
    assert plan(layout, layout, 16, 41) == expected


def test_a_block_that_begins_before_the_range_keeps_its_first_tokens() -> None:
    layout = KvLayout(4, 1, 1, 8, "int8")
    found = plan(layout, layout, 2, 8)
    rows = [(each.target_block, each.target_offset, each.length) for each in found]
    codes, scales = [(0, 2 * 8, 16), (0, 6 * 8, 16)], [(0, 64 + 8, 8), (0, 64 + 24, 8)]
    assert sorted(rows) == sorted([*codes, *scales, (1, 0, layout.block_bytes)])


def test_all_heads_of_a_layer_move_in_one_piece() -> None:
    source, target = (KvLayout(16, 3, 8, 4, "bfloat16", ranks) for ranks in (4, 2))
    found = plan(source, target, 0, 16)
    assert len(found) == 4 * 3 * 2
    assert {each.length for each in found} == {2 * 16 * 4 * 2}


@pytest.mark.parametrize(("heads", "source_ranks"), [(1, 8), (2, 8), (2, 4)])
@pytest.mark.parametrize("target_ranks", [1, 2, 4, 8])
def test_replicas_take_turns(heads: int, source_ranks: int, target_ranks: int) -> None:
    source, target = (KvLayout(4, 1, heads, 4, "int8", n) for n in (source_ranks, target_ranks))
    read: Counter[int] = Counter()
    for each in plan(source, target, 0, 4 * 8):
        read[each.source_rank] += each.length
    assert set(read) == set(range(source_ranks))
    assert len(set(read.values())) == 1


DEGREE = st.integers(1, 12)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(DEGREE, DEGREE, DEGREE, st.integers(0, 40))
def test_every_head_of_every_rank_comes_from_one_rank(
    heads: int, source_ranks: int, target_ranks: int, block: int
) -> None:
    source, target = (KvLayout(4, 1, heads, 4, "int8", n) for n in (source_ranks, target_ranks))
    given_by = Counter(
        (shard.target_rank, head)
        for shard in shards(source, target)
        for head in shard.heads
        if shard.has(block)
    )
    assert given_by == Counter(
        (rank, head) for rank in range(target_ranks) for head in target.heads_of(rank)
    )
    for shard in shards(source, target):
        assert shard.heads.start in source.heads_of(shard.source_rank)
        assert shard.heads[-1] in source.heads_of(shard.source_rank)


def test_no_tokens_need_no_slices() -> None:
    layout = KvLayout(16, 2, 2, 8, "fp8")
    assert plan(layout, replace(layout, block_size=8), 20, 20) == []


@pytest.mark.parametrize("change", [{"layers": 9}, {"kv_heads": 9}, {"head_dim": 9}])
def test_a_refusal_names_both_sides(change: dict[str, int]) -> None:
    source = KvLayout(16, 2, 3, 8, "int8")
    ((name, value),) = change.items()
    with pytest.raises(GeometryMismatch, match=f"{name}={getattr(source, name)}.*{name}={value}"):
        plan(source, replace(source, **change), 0, 1)  # type: ignore[arg-type]


def test_bytes_of_another_type_are_refused() -> None:
    source = KvLayout(16, 2, 3, 8, "int8")
    with pytest.raises(GeometryMismatch, match=r"int8.*fp8"):
        plan(source, replace(source, kv_dtype="fp8"), 0, 1)


@pytest.mark.parametrize(("first", "last"), [(-1, 3), (4, 3)])
def test_a_range_that_is_none_is_refused(first: int, last: int) -> None:
    layout = KvLayout(16, 2, 3, 8, "int8")
    with pytest.raises(HandoffError, match="invalid token range"):
        plan(layout, layout, first, last)
