"""Encodes the messages that rank 0 sends to the other ranks: plain numbers, no pickle. Pure, with
numpy.

A frame is one byte for its kind, followed by little-endian numbers. A row's block table is sent
once: for a sequence that was in the previous step, only added blocks are sent.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow

_STEP = struct.Struct("<BBIIII")
"""Head of a step's frame: kind, greedy, and numbers of rows, tokens, outputs and layers whose
states are wanted."""
_ROW = np.dtype(
    [("id", "<i8"), ("start", "<i4"), ("count", "<i4"), ("kept", "<i4"), ("new", "<i4")]
)
_NUMBER = np.dtype("<i4")

Copies: TypeAlias = tuple[tuple[int, int], ...]


class Kind(IntEnum):
    """What a rank must do with a frame from rank 0."""

    STEP = 1
    """Compute this rank's part of a step."""
    DRAWING_STEP = 2
    """Compute this rank's part of a step, and receive the tokens that rank 0 samples, because the
    next step may refer to these tokens."""
    COPY = 3
    """Copy KV blocks."""
    WARM_UP = 4
    """Warm up: on a GPU, compile kernels and capture decode steps before requests arrive."""


@dataclass(frozen=True, slots=True)
class Told:
    """A decoded frame from rank 0."""

    kind: Kind
    step: StepInput | None = None
    copies: Copies = ()


class StepWriter:
    """Encodes steps on rank 0. Used by the engine thread."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[int, ...]] = {}

    def step(self, step: StepInput, *, draws: bool) -> bytes:
        """Encode a step as a frame. With ``draws``, the ranks receive the sampled tokens
        afterwards."""
        rows = np.zeros(len(step.rows), _ROW)
        added: list[int] = []
        tables: dict[int, tuple[int, ...]] = {}
        for place, row in enumerate(step.rows):
            before = self._tables.get(row.sequence_id, ())
            kept = len(before)
            if row.block_table is not before and row.block_table[:kept] != before:
                kept = 0
            new = row.block_table[kept:]
            rows[place] = (row.sequence_id, row.start, row.count, kept, len(new))
            added += new
            tables[row.sequence_id] = row.block_table
        self._tables = tables
        kind = Kind.DRAWING_STEP if draws else Kind.STEP
        lists = step.token_ids, step.outputs, step.hidden_layers
        head = _STEP.pack(kind, step.greedy, len(rows), *(len(one) for one in lists))
        numbers = [number for one in (added, *lists) for number in one]
        return head + rows.tobytes() + _numbers(numbers)


class StepReader:
    """Decodes frames on a rank other than 0."""

    def __init__(self) -> None:
        self._tables: dict[int, tuple[int, ...]] = {}

    def read(self, frame: bytes) -> Told:
        """Decode a frame. Raises ValueError if it is invalid."""
        kind = Kind(frame[0])
        if kind is Kind.COPY:
            pairs = np.frombuffer(frame, _NUMBER, offset=1).reshape(-1, 2).tolist()
            return Told(kind, copies=tuple((one, other) for one, other in pairs))
        if kind is Kind.WARM_UP:
            return Told(kind)
        _, greedy, count, *sizes = _STEP.unpack_from(frame)
        heads = np.frombuffer(frame, _ROW, count, _STEP.size)
        numbers = np.frombuffer(frame, _NUMBER, offset=_STEP.size + heads.nbytes).tolist()
        rows, end = self._rows(heads, numbers)
        if len(numbers) != end + sum(sizes):
            raise ValueError(
                f"a step of {len(frame)} bytes is too short or too long for {count} rows"
            )
        lists = []
        for size in sizes:
            lists.append(numbers[end : end + size])
            end += size
        token_ids, outputs, layers = lists
        return Told(kind, StepInput(rows, token_ids, outputs, bool(greedy), tuple(layers)))

    def _rows(
        self, heads: npt.NDArray[np.void], numbers: Sequence[int]
    ) -> tuple[tuple[PlanRow, ...], int]:
        """Decode a step's rows. Returns the rows, and the index in ``numbers`` of the first number
        after their block tables."""
        tables: dict[int, tuple[int, ...]] = {}
        rows: list[PlanRow] = []
        end = 0
        for sequence, start, count, kept, new in heads.tolist():
            before = self._tables.get(sequence, ())
            if kept > len(before):
                raise ValueError(f"sequence {sequence} has {len(before)} blocks, not {kept}")
            # An equal table is the same object, so the model notices that nothing has changed.
            unchanged = not new and kept == len(before)
            table = before if unchanged else (*before[:kept], *numbers[end : end + new])
            end += new
            tables[sequence] = table
            rows.append(PlanRow(sequence, start, count, table, sample=False))
        self._tables = tables
        return tuple(rows), end


def copy_frame(copies: Sequence[tuple[int, int]]) -> bytes:
    """Encode a frame that copies KV blocks, given as pairs (from, to)."""
    return bytes((Kind.COPY,)) + _numbers([block for pair in copies for block in pair])


def warm_up_frame() -> bytes:
    """Encode a frame that warms up a GPU."""
    return bytes((Kind.WARM_UP,))


def _numbers(values: Sequence[int]) -> bytes:
    return np.array(values, dtype=_NUMBER).tobytes()
