"""What rank 0 tells the others is what they read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.parallel.step_codec import Kind, StepReader, StepWriter, copy_frame, warm_up_frame
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow

tables = st.lists(st.integers(0, 1 << 20), max_size=12).map(tuple)
rows = st.builds(
    PlanRow,
    sequence_id=st.integers(0, 3),
    start=st.integers(0, 1 << 20),
    count=st.integers(1, 512),
    block_table=tables,
    sample=st.just(False),
)
numbers = st.lists(st.integers(-64, 1 << 20), max_size=9)
inputs = st.builds(
    StepInput,
    rows=st.lists(rows, max_size=4, unique_by=lambda row: row.sequence_id).map(tuple),
    token_ids=numbers,
    outputs=numbers,
    greedy=st.booleans(),
    hidden_layers=st.lists(st.integers(0, 80), max_size=2).map(tuple),
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.tuples(inputs, st.booleans()), max_size=6))
def test_steps_are_read_as_they_were_sent(steps: list[tuple[StepInput, bool]]) -> None:
    writer, reader = StepWriter(), StepReader()
    for step, draws in steps:
        told = reader.read(writer.step(step, draws=draws))
        assert told.step == step
        assert told.kind is (Kind.DRAWING_STEP if draws else Kind.STEP)


def test_a_decode_step_is_small_however_long_its_sequences_are() -> None:
    writer, reader = StepWriter(), StepReader()
    table = tuple(range(2000))
    row = PlanRow(7, 31_990, 1, table, False)
    first = StepInput(tuple(replace(row, sequence_id=n) for n in range(64)), [5] * 64, [], True)
    assert reader.read(writer.step(first, draws=False)).step == first
    longer = tuple(
        replace(row, start=row.start + 10, sequence_id=n, block_table=(*table, 9000))
        for n in range(64)
    )
    second = replace(first, rows=longer)
    frame = writer.step(second, draws=False)
    assert len(frame) < 64 * 40
    assert reader.read(frame).step == second


def test_a_table_stays_the_same_object_until_it_changes() -> None:
    """A GPU sends the tables that are another object to its memory."""
    writer, reader = StepWriter(), StepReader()
    found = []
    for start, table in ((20, (4, 5)), (21, (4, 5)), (32, (4, 5, 6))):
        step = StepInput((PlanRow(0, start, 1, table, False),), [1], [0], True)
        told = reader.read(writer.step(step, draws=False)).step
        assert told == step
        found.append(told.rows[0].block_table)
    assert found[1] is found[0]
    assert found[2] is not found[0]


def test_copies_and_warm_ups_are_read() -> None:
    reader = StepReader()
    assert reader.read(copy_frame([(1, 2), (70_000, 3)])).copies == ((1, 2), (70_000, 3))
    assert reader.read(warm_up_frame()).kind is Kind.WARM_UP


def test_what_was_never_told_is_refused() -> None:
    step = StepInput((PlanRow(0, 0, 1, (4,), False),), [1], [0], True)
    writer = StepWriter()
    writer.step(step, draws=False)
    delta = writer.step(step, draws=False)
    with pytest.raises(ValueError, match="has 0 blocks, not 1"):
        StepReader().read(delta)
    with pytest.raises(ValueError, match="a step of"):
        StepReader().read(StepWriter().step(step, draws=False) + bytes(4))
    with pytest.raises(ValueError, match="99"):
        StepReader().read(bytes((99,)))
