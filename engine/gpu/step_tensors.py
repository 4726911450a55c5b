"""The input tensors of a step's kernels, without weights and cache. They are in one buffer, which
is copied to the GPU at once. Only the block tables stay on the GPU (``engine.gpu.block_tables``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from engine.gpu.draws import DrawArrays
from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow

_ALIGNMENT = 16
"""Alignment of each tensor in the buffer, in bytes. Triton compiles another kernel for a tensor
with a smaller alignment."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The numbers of rows and tokens of a step, including padding.

    Rows of one token (``singles``) come first, then rows of several (``chunks``).
    """

    singles: int
    longest_single: int
    """Maximum number of tokens to which a row of one token attends."""
    chunks: int
    chunk_tokens: int
    """Number of tokens in all chunks together."""
    longest_chunk: int
    """Maximum number of tokens in one chunk."""
    width: int
    """Number of blocks of each row's block table that the step may use."""
    outputs: int

    @property
    def tokens(self) -> int:
        return self.singles + self.chunk_tokens


@dataclass(frozen=True, slots=True)
class StepTensors:
    """The input tensors of a step: views of one buffer on the host or on a GPU, and of the block
    tables there."""

    shape: StepShape
    slots: torch.Tensor
    """Slot mapping of the tokens, int64 [tokens]; -1 for padding."""
    outputs: torch.Tensor
    """Indexes of the tokens whose logits are wanted, int64 [outputs]."""
    keys: torch.Tensor
    """Noise keys of each output's draw, int64 [outputs, 2]."""
    token_ids: torch.Tensor
    """Token ids and placeholders, int32 [tokens], in the form that ``engine.gpu.kernels.embedding``
    reads."""
    positions: torch.Tensor
    """Position of each token in its sequence, int32 [tokens]."""
    lengths: torch.Tensor
    """Number of tokens to which each row of one token attends, int32 [singles]; 0 for padding."""
    query_starts: torch.Tensor
    """For each chunk, the index of its first token among the tokens of all chunks. The last entry
    is the number of these tokens; int32 [chunks + 1]."""
    contexts: torch.Tensor
    """For each chunk, the number of tokens that precede it in its sequence, int32 [chunks]."""
    temperatures: torch.Tensor
    """Sampling temperature of each output, fp32 [outputs]; 0 for the most likely token."""
    tables: torch.Tensor
    """Block tables of the rows, int32 [singles + chunks, width]. Entries after a row's last token
    have no meaning."""


def _fields(shape: StepShape) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """List the type and shape of each tensor in the buffer, by name."""
    return {
        "slots": (torch.int64, (shape.tokens,)),
        "outputs": (torch.int64, (shape.outputs,)),
        "keys": (torch.int64, (shape.outputs, 2)),
        "token_ids": (torch.int32, (shape.tokens,)),
        "positions": (torch.int32, (shape.tokens,)),
        "lengths": (torch.int32, (shape.singles,)),
        "query_starts": (torch.int32, (shape.chunks + 1,)),
        "contexts": (torch.int32, (shape.chunks,)),
        "temperatures": (torch.float32, (shape.outputs,)),
    }


def buffer_bytes(shape: StepShape) -> int:
    """Compute the size of the buffer that ``step_tensors`` needs, in bytes."""
    return sum(_aligned(dtype, size) for dtype, size in _fields(shape).values())


def step_tensors(buffer: torch.Tensor, shape: StepShape, tables: torch.Tensor) -> StepTensors:
    """Make the step's tensors as views of ``buffer``, uint8 [at least buffer_bytes(shape)], and of
    ``tables``, int32 [at least singles + chunks, at least width]."""
    views, end = {}, 0
    for name, (dtype, size) in _fields(shape).items():
        start, end = end, end + _aligned(dtype, size)
        length = dtype.itemsize * math.prod(size)
        views[name] = buffer[start : start + length].view(dtype).view(size)
    return StepTensors(shape, **views, tables=tables[: shape.singles + shape.chunks, : shape.width])


def _aligned(dtype: torch.dtype, size: tuple[int, ...]) -> int:
    """Compute the bytes of a tensor in the buffer, including padding up to the next one."""
    return -(-dtype.itemsize * math.prod(size) // _ALIGNMENT) * _ALIGNMENT


def table_width(tokens: int, block_size: int) -> int:
    """Compute the number of blocks in a block table for ``tokens`` tokens, rounded up so that every
    table is aligned."""
    step = _ALIGNMENT // 4
    return -(-tokens // (block_size * step)) * step


def ordered_rows(rows: Sequence[PlanRow], *, singles_first: bool) -> list[int]:
    """Sort the rows into the order in which a step computes them. Returns row indexes. With
    ``singles_first``, rows of one token come first."""
    numbers = range(len(rows))
    return sorted(numbers, key=lambda n: rows[n].count > 1) if singles_first else list(numbers)


def step_shape(
    rows: Sequence[PlanRow], outputs: int, block_size: int, *, singles_first: bool
) -> StepShape:
    """Compute the shape of a step without padding. Without ``singles_first``, rows of one token
    count as chunks, too."""
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
    host: StepTensors,
    step: StepInput,
    order: Sequence[int] | None,
    block_size: int,
    draws: DrawArrays | None,
) -> None:
    """Write a step into its tensors on the host. The rest of each tensor is filled with padding.

    ``order`` is the result of ``ordered_rows``; None means the order of the plan. ``draws`` is None
    if no token is drawn. The block tables must be filled already.
    """
    counts = np.array([row.count for row in step.rows], dtype=np.int64)
    starts = np.array([row.start for row in step.rows], dtype=np.int64)
    source = _source(counts, order)
    if order is not None:
        counts, starts = counts[order], starts[order]
    begins = _before(counts)
    tokens, rows = len(source), len(counts)
    token_ids = np.array(step.token_ids, dtype=np.int64)
    tables = host.tables.numpy()
    row_of = np.repeat(np.arange(rows), counts)
    positions = np.arange(tokens) - begins[row_of] + starts[row_of]
    slots = tables[row_of, positions // block_size].astype(np.int64) * block_size
    _fill(host.slots, slots + positions % block_size, -1)
    _fill(host.token_ids, token_ids[source], 0)
    _fill(host.positions, positions, 0)
    singles = host.shape.singles
    # Without singles in the shape, every row is a chunk.
    single_rows = min(singles, rows if host.shape.chunks == 0 else singles)
    _fill(host.lengths, starts[:single_rows] + 1, 0)
    chunk_begins = begins[single_rows:] - single_rows
    _fill(host.query_starts, chunk_begins, tokens - single_rows)
    _fill(host.contexts, starts[single_rows:], 0)
    outputs = np.argsort(source)[np.array(step.outputs, dtype=np.int64)]
    _fill(host.outputs, outputs, 0)
    if draws is None:
        host.temperatures.zero_()
        host.keys.zero_()
        return
    _fill(host.temperatures, draws.temperatures, 0)
    # The drawn token follows the one whose logits it is drawn from.
    _fill(host.keys, draws.keys(positions[outputs] + 1), 0)


def plan_places(rows: Sequence[PlanRow], order: Sequence[int]) -> npt.NDArray[np.int64]:
    """For each token in the plan's order, find its index in the order in which the step computes
    tokens.

    ``order`` is the result of ``ordered_rows``.
    """
    counts = np.array([row.count for row in rows], dtype=np.int64)
    return np.argsort(_source(counts, order))


def _fill(target: torch.Tensor, values: npt.NDArray[Any], rest: int) -> None:
    array = target.numpy()
    array[: len(values)] = values
    array[len(values) :] = rest


def _source(counts: npt.NDArray[np.int64], order: Sequence[int] | None) -> npt.NDArray[np.int64]:
    """For each token in the order in which the step computes tokens, find its index in the plan's
    order. ``counts`` has the number of tokens of each row of the plan."""
    if order is None:
        return np.arange(counts.sum())
    begins, counts = _before(counts)[order], counts[order]
    within = np.arange(counts.sum()) - np.repeat(_before(counts), counts)
    found: npt.NDArray[np.int64] = np.repeat(begins, counts) + within
    return found


def _before(counts: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """For each count, compute the sum of the counts before it."""
    found: npt.NDArray[Any] = np.cumsum(counts) - counts
    return found
