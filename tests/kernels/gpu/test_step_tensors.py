"""The buffer that a step's tensors are views of: order of rows, padding, names of tokens."""

from __future__ import annotations

import torch

from engine.gpu.block_tables import BlockTables
from engine.gpu.draws import GREEDY, Draw, DrawArrays
from engine.gpu.step_tensors import (
    StepShape,
    StepTensors,
    buffer_bytes,
    fill_step,
    ordered_rows,
    step_shape,
    step_tensors,
)
from engine.sampling.noise import noise_keys
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow

SIZE = 4
WARM = Draw(0.5, 2**64 - 3, 1, 0, 1.0, 0.0)
ROWS = (
    PlanRow(0, 3, 2, (9, 8), True),
    PlanRow(1, 6, 1, (5, 7, 6), True),
    PlanRow(2, 0, 3, (2,), False),
    PlanRow(3, 0, 1, (1,), True),
)
STEP = StepInput(ROWS, [10, 11, 20, 30, 31, 32, -2], [1, 2, 6], False)


def filled(step: StepInput, shape: StepShape, *, singles_first: bool) -> StepTensors:
    # Whatever the buffer held before.
    buffer = torch.full((buffer_bytes(shape) + 8,), 0xAB, dtype=torch.uint8)
    tables = BlockTables(4, 4, torch.device("cpu"))
    tensors = step_tensors(buffer, shape, tables.device)
    order = ordered_rows(step.rows, singles_first=singles_first)
    tables.update(step.rows, order)
    draws = DrawArrays([GREEDY, WARM, GREEDY][: len(step.outputs)])
    fill_step(tensors, step, order, SIZE, draws)
    return tensors


def test_single_tokens_come_before_chunks() -> None:
    shape = step_shape(ROWS, 3, SIZE, singles_first=True)
    assert shape == StepShape(
        singles=2,
        longest_single=7,
        chunks=2,
        chunk_tokens=5,
        longest_chunk=3,
        width=4,
        outputs=3,
    )
    found = filled(STEP, shape, singles_first=True)
    assert found.token_ids.tolist() == [20, -2, 10, 11, 30, 31, 32]
    assert found.positions.tolist() == [6, 0, 3, 4, 0, 1, 2]
    assert found.slots.tolist() == [7 * 4 + 2, 4, 9 * 4 + 3, 8 * 4, 8, 9, 10]
    assert found.lengths.tolist() == [7, 1]
    assert found.query_starts.tolist() == [0, 2, 5]
    assert found.contexts.tolist() == [3, 0]
    assert found.tables.tolist() == [[5, 7, 6, 0], [1, 0, 0, 0], [9, 8, 0, 0], [2, 0, 0, 0]]
    # The plan's tokens 1, 2 and 6 are the step's 3, 0 and 1.
    assert found.outputs.tolist() == [3, 0, 1]
    assert found.temperatures.tolist() == [0.0, 0.5, 0.0]
    # Output 1 is the token at position 6, so its draw is that of position 7.
    assert found.keys[1].tolist() == list(noise_keys(WARM.seed, WARM.choice, 7))


def test_every_row_may_be_a_chunk() -> None:
    shape = step_shape(ROWS, 3, SIZE, singles_first=False)
    assert (shape.singles, shape.chunks, shape.chunk_tokens) == (0, 4, 7)
    found = filled(STEP, shape, singles_first=False)
    assert found.token_ids.tolist() == STEP.token_ids
    assert found.query_starts.tolist() == [0, 2, 3, 6, 7]
    assert found.contexts.tolist() == [3, 6, 0, 0]
    assert found.outputs.tolist() == [1, 2, 6]
    assert len(found.lengths) == 0


def test_padding_has_no_slot_and_no_length() -> None:
    step = StepInput(ROWS[1:2], [20], [0], False)
    shape = StepShape(3, 8, 0, 0, 1, 2, 3)
    found = filled(step, shape, singles_first=True)
    assert found.slots.tolist() == [30, -1, -1]
    assert found.lengths.tolist() == [7, 0, 0]
    assert found.token_ids.tolist() == [20, 0, 0]
    assert found.positions.tolist() == [6, 0, 0]
    assert found.tables.tolist() == [[5, 7], [0, 0], [0, 0]]
    assert found.temperatures.tolist() == [0.0, 0.0, 0.0]


def test_padding_of_chunks_has_no_tokens() -> None:
    step = StepInput(ROWS[1:2], [20], [0], False)
    found = filled(step, StepShape(0, 8, 3, 3, 1, 2, 3), singles_first=False)
    assert found.slots.tolist() == [30, -1, -1]
    assert found.query_starts.tolist() == [0, 1, 1, 1]
    assert found.contexts.tolist() == [6, 0, 0]


def test_a_step_of_padding_alone() -> None:
    shape = StepShape(2, 8, 0, 0, 1, 2, 2)
    found = filled(StepInput((), [], [], True), shape, singles_first=True)
    assert found.slots.tolist() == [-1, -1]
    assert found.lengths.tolist() == [0, 0]


def test_every_tensor_is_aligned() -> None:
    shape = step_shape(ROWS, 3, SIZE, singles_first=True)
    buffer = torch.empty(buffer_bytes(shape), dtype=torch.uint8)
    tensors = step_tensors(buffer, shape, BlockTables(4, 4, torch.device("cpu")).device)
    found = [tensors.slots, tensors.outputs, tensors.keys, tensors.token_ids, tensors.positions]
    found += [tensors.lengths, tensors.query_starts, tensors.contexts, tensors.temperatures]
    assert all((one.data_ptr() - buffer.data_ptr()) % 16 == 0 for one in found)
