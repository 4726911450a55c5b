"""Blocks and layers in any order of completion: every layer is given out once."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from kvtransfer.layout.layout import KvLayout
from kvtransfer.pairs.put_plan import Part, PutPlan

LAYOUTS = (KvLayout(2, 4, 1, 8, "bfloat16"), KvLayout(2, 3, 1, 5, "int8"))


LAYERS = 4


def cover(parts: list[Part], block: int) -> list[int]:
    """How often each layer of a block is given out."""
    counts = [0] * LAYERS
    for target, first, last in parts:
        assert first < last
        if target == block:
            for layer in range(first, last):
                counts[layer] += 1
    return counts


@given(
    missing=st.integers(0, 6),
    calls=st.lists(
        st.tuples(st.booleans(), st.integers(0, 8), st.integers(1, LAYERS)), max_size=12
    ),
)
@settings(deadline=None)
def test_every_layer_once(missing: int, calls: list[tuple[bool, int, int]]) -> None:
    plan = PutPlan(LAYERS, missing)
    parts: list[Part] = []
    for is_whole, blocks, layers in calls:
        parts += plan.blocks_done(blocks) if is_whole else plan.layers_done(blocks, layers)
        for block in range(missing):
            assert max(cover(parts, block)) <= 1
    parts += plan.blocks_done(missing)
    for block in range(missing):
        assert set(cover(parts, block)) == {1}
    assert all(0 <= block < missing for block, _, _ in parts)


def test_layers_of_a_chunk_then_its_end() -> None:
    plan = PutPlan(LAYERS, 3)
    assert plan.layers_done(2, 1) == [(0, 0, 1), (1, 0, 1)]
    assert plan.layers_done(2, 1) == [], "nothing new"
    assert plan.layers_done(2, 3) == [(0, 1, 3), (1, 1, 3)]
    assert plan.blocks_done(2) == [(0, 3, 4), (1, 3, 4)]
    assert plan.layers_done(3, 2) == [(2, 0, 2)]
    assert plan.blocks_done(3) == [(2, 2, 4)]


def test_a_chunk_whose_predecessor_was_not_told_of_waits_for_it() -> None:
    plan = PutPlan(LAYERS, 4)
    plan.layers_done(2, 1)
    assert plan.layers_done(4, 2) == []
    assert len(plan.blocks_done(2)) == 2
    assert len(plan.layers_done(4, 2)) == 2


def test_blocks_of_which_all_layers_have_gone_go_no_more() -> None:
    plan = PutPlan(LAYERS, 2)
    assert plan.layers_done(2, LAYERS) == [(0, 0, 4), (1, 0, 4)]
    assert plan.blocks_done(2) == []


@given(
    layout=st.sampled_from(LAYOUTS),
    cuts=st.lists(st.integers(0, 4), max_size=4),
)
def test_layer_runs_cover_a_block_once(layout: KvLayout, cuts: list[int]) -> None:
    bounds = sorted({0, layout.layers, *(min(cut, layout.layers) for cut in cuts)})
    counts = [0] * layout.block_bytes
    for first, last in itertools.pairwise(bounds):
        for offset, length in layout.layer_runs(first, last):
            for byte in range(offset, offset + length):
                counts[byte] += 1
    assert set(counts) == {1}


def test_a_layers_run_holds_its_rows() -> None:
    layout = LAYOUTS[1]
    runs = layout.layer_runs(1, 2)
    row = layout.row(1, 0, 0, 0)
    assert [offset for offset, _ in runs] == [layout.code_offset(row), layout.scale_offset(row)]
