"""The inputs of a step's kernels, without weights and cache, in one buffer: one copy to the GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.gpu.draws import Draw
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow

_ALIGNMENT = 16
"""Alignment in bytes. Triton compiles another kernel for a tensor with a smaller alignment."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step, including padding rows.

    Sequences with one token (``singles``) come first, then those with several (``chunks``).
    """

    singles: int
    longest_single: int
    """Maximum tokens that a single attends to."""
    chunks: int
    chunk_tokens: int
    """Tokens of all chunks together."""
    longest_chunk: int
    """Maximum tokens of one chunk."""
    width: int
    """Number of blocks in a table."""
    outputs: int

    @property
    def tokens(self) -> int:
        return self.singles + self.chunk_tokens


@dataclass(frozen=True, slots=True)
class StepTensors:
    """Views of one buffer, on the host or on a GPU."""

    shape: StepShape
    slots: torch.Tensor
    """int64 [tokens]: the slot mapping, -1 for padding."""
    outputs: torch.Tensor
    """int64 [outputs]: indexes of the tokens whose logits are wanted."""
    keys: torch.Tensor
    """int64 [outputs, 2]: keys of their noise."""
    token_ids: torch.Tensor
    """int32 [tokens], in the form that ``engine.gpu.kernels.embedding`` reads."""
    positions: torch.Tensor
    """int32 [tokens]: position of each token in its sequence."""
    lengths: torch.Tensor
    """int32 [singles]: number of tokens that each attends to, 0 for padding."""
    query_starts: torch.Tensor
    """int32 [chunks + 1]: start of each chunk among the chunks' tokens, and the end of all."""
    contexts: torch.Tensor
    """int32 [chunks]: number of tokens before each chunk."""
    tables: torch.Tensor
    """Block tables: int32 [singles + chunks, width]."""
    temperatures: torch.Tensor
    """fp32 [outputs], 0 for the most likely token."""


def _fields(shape: StepShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Types and sizes of the fields by name."""
    sequences = shape.singles + shape.chunks
    return {
        "slots": (torch.int64, (shape.tokens,)),
        "outputs": (torch.int64, (shape.outputs,)),
        "keys": (torch.int64, (shape.outputs, 2)),
        "token_ids": (torch.int32, (shape.tokens,)),
        "positions": (torch.int32, (shape.tokens,)),
        "lengths": (torch.int32, (shape.singles,)),
        "query_starts": (torch.int32, (shape.chunks + 1,)),
        "contexts": (torch.int32, (shape.chunks,)),
        "tables": (torch.int32, (sequences, shape.width)),
        "temperatures": (torch.float32, (shape.outputs,)),
    }


def buffer_bytes(shape: StepShape) -> int:
    """Size of the buffer that ``step_tensors`` needs, in bytes."""
    return sum(_aligned(dtype, size) for dtype, size in _fields(shape).values())


def step_tensors(buffer: torch.Tensor, shape: StepShape) -> StepTensors:
    """Views of a buffer, uint8 [at least buffer_bytes(shape)]."""
    views, end = {}, 0
    for name, (dtype, size) in _fields(shape).items():
        start, end = end, end + _aligned(dtype, size)
        length = dtype.itemsize * math.prod(size)
        views[name] = buffer[start : start + length].view(dtype).view(size)
    return StepTensors(shape, **views)


def _aligned(dtype: torch.dtype, size: tuple[int, ...]) -> int:
    """Bytes of a field, including padding up to the next one."""
    return -(-dtype.itemsize * math.prod(size) // _ALIGNMENT) * _ALIGNMENT


def table_width(tokens: int, block_size: int) -> int:
    """Number of blocks in a table for ``tokens`` tokens, rounded up so that every table is
    aligned."""
    step = _ALIGNMENT // 4
    return -(-tokens // (block_size * step)) * step


def ordered_rows(rows: Sequence[PlanRow], *, singles_first: bool) -> list[int]:
    """The order in which a step computes its rows, as row indexes."""
    numbers = range(len(rows))
    return sorted(numbers, key=lambda n: rows[n].count > 1) if singles_first else list(numbers)


def step_shape(
    rows: Sequence[PlanRow], outputs: int, block_size: int, *, singles_first: bool
) -> StepShape:
    """The shape of a step without padding. Without ``singles_first``, all rows are chunks."""
    singles = [row for row in rows if row.count == 1 and singles_first]
    chunks = [row for row in rows if row.count > 1 or not singles_first]
    longest = max(row.start + row.count for row in rows)
    return StepShape(
        singles=len(singles),
        longest_single=max((row.start + 1 for row in singles), default=0),
        chunks=len(chunks),
        chunk_tokens=sum(row.count for row in chunks),
        longest_chunk=max((row.count for row in chunks), default=0),
        width=table_width(longest, block_size),
        outputs=outputs,
    )


def fill_step(
    host: StepTensors, step: StepInput, order: Sequence[int], block_size: int, draws: Sequence[Draw]
) -> None:
    """Write a step into tensors on the host. What is larger than the step becomes padding."""
    rows = [step.rows[number] for number in order]
    counts = np.array([row.count for row in rows], dtype=np.int64)
    starts = np.array([row.start for row in rows], dtype=np.int64)
    begins = _before(counts)
    tokens = int(counts.sum())
    source = _source(step.rows, order)
    token_ids = np.array(step.token_ids, dtype=np.int64)
    tables = host.tables.numpy()
    _fill_tables(tables, rows)
    row_of = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(tokens) - begins[row_of] + starts[row_of]
    slots = tables[row_of, positions // block_size].astype(np.int64) * block_size
    _fill(host.slots, slots + positions % block_size, -1)
    _fill(host.token_ids, token_ids[source], 0)
    _fill(host.positions, positions, 0)
    singles = host.shape.singles
    # Without singles in the shape, every row is a chunk.
    single_rows = min(singles, len(rows) if host.shape.chunks == 0 else singles)
    _fill(host.lengths, starts[:single_rows] + 1, 0)
    chunk_begins = begins[single_rows:] - single_rows
    _fill(host.query_starts, chunk_begins, tokens - single_rows)
    _fill(host.contexts, starts[single_rows:], 0)
    _fill(host.outputs, np.argsort(source)[np.array(step.outputs, dtype=np.int64)], 0)
    _fill(host.temperatures, np.array([draw.temperature for draw in draws]), 0)
    host.keys.zero_()
    if draws:
        host.keys.numpy()[: len(draws)] = [draw.keys for draw in draws]


def plan_places(rows: Sequence[PlanRow], order: Sequence[int]) -> npt.NDArray[np.int64]:
    """The place of each token of the plan's rows among those of the step.

    ``order`` is the result of ``ordered_rows``.
    """
    return np.argsort(_source(rows, order))


def _fill(target: torch.Tensor, values: npt.NDArray[Any], rest: int) -> None:
    array = target.numpy()
    array[: len(values)] = values
    array[len(values) :] = rest


def _fill_tables(tables: npt.NDArray[Any], rows: Sequence[PlanRow]) -> None:
    """Write each row's blocks, as many as fit the table; unused zeros follow."""
    tables.fill(0)
    if not rows:
        return
    width = tables.shape[1]
    counts = np.array([min(width, len(row.block_table)) for row in rows])
    blocks = chain.from_iterable(row.block_table[:width] for row in rows)
    at = np.arange(counts.sum()) - np.repeat(_before(counts), counts)
    found = np.fromiter(blocks, np.int32, int(counts.sum()))
    tables[np.repeat(np.arange(len(rows)), counts), at] = found


def _source(rows: Sequence[PlanRow], order: Sequence[int]) -> npt.NDArray[Any]:
    """For each token in the step's order, its index in the plan."""
    begins = _before(np.array([row.count for row in rows], dtype=np.int64))
    spans = [np.arange(begins[n], begins[n] + rows[n].count) for n in order]
    return np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)


def _before(counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The sums of all counts before each."""
    found: npt.NDArray[Any] = np.cumsum(counts) - counts
    return found
