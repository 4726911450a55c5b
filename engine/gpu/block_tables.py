"""The block tables of a step's rows, in the GPU's memory from step to step. Only changes are sent.

Most steps have the rows of the previous one, and a row's table changes only when it gets a block.
So a step sends some numbers instead of hundreds of thousands. The tables of captured steps must
stay at one address anyway.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from engine.gpu.graphs import batch_sizes
from engine.scheduling.plan import PlanRow

CHANGE_BYTES = 12
"""Bytes that a changed entry takes on its way to the device: its index, int64, and the block,
int32."""
MAX_SENT = 1 << 18
"""Maximum number of entries that are sent at a time, which bounds the memory for them."""


class RowOrder:
    """Chooses the order of a step's rows, so that a sequence keeps its row while it decodes.

    If a sequence has left, a new one takes its row, or else the last one. So few block tables move.
    """

    def __init__(self) -> None:
        self._order: list[int] = []
        """Ids of the sequences that decoded in the latest step, by row."""
        self._plan: list[int] = []
        """The same ids in the order of the plan; empty if the step had other rows, too."""
        self._places: list[int] = []

    def arrange(self, rows: Sequence[PlanRow]) -> list[int]:
        """Return the indexes of the plan's rows in the order in which they are computed. Rows of
        several tokens come last."""
        ids = [row.sequence_id for row in rows]
        chunks = [place for place, row in enumerate(rows) if row.count > 1]
        if chunks or ids != self._plan:
            places = {number: place for place, number in enumerate(ids)}
            for chunk in chunks:
                del places[ids[chunk]]
            self._order = _without_moving(self._order, list(places))
            self._places = [*(places[number] for number in self._order), *chunks]
            self._plan = [] if chunks else ids
        return self._places


def _without_moving(before: Sequence[int], now: Sequence[int]) -> list[int]:
    """Order the ids ``now`` so that those that were in ``before`` keep their places, as far as
    possible without gaps."""
    here, were = set(now), set(before)
    new = deque(number for number in now if number not in were)
    order = [number if number in here else None for number in before]
    for place in range(len(order)):
        while order and order[-1] is None and not new:
            order.pop()
        if place < len(order) and order[place] is None:
            order[place] = new.popleft() if new else order.pop()
    return [number for number in (*order, *new) if number is not None]


def table_rows(max_rows: int, *, divided: bool) -> int:
    """Compute how many block tables a step needs at most. ``max_rows`` is the number of rows of a
    decode step, and ``divided`` is true if ranks divide prompts: each has up to two pieces of a
    row."""
    return max(batch_sizes(max_rows)[-1], 2 * max_rows if divided else 0)


class BlockTables:
    """The block tables of the latest step's rows, on the host and on a device."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        """Make room for ``rows`` tables of up to ``width`` blocks, for use in steps on
        ``device``."""
        self.host: npt.NDArray[np.int32] = np.zeros((rows, width), np.int32)
        """The tables, int32 [rows, width]. Entries after a table's end are those of earlier
        tables, and have no meaning."""
        self.device = torch.zeros(rows, width, dtype=torch.int32, device=device)
        """The same tables on the device."""
        self._tables: list[tuple[int, ...]] = [()] * rows

    def update(self, rows: Sequence[PlanRow], order: Sequence[int] | None = None) -> int:
        """Store the tables of a step's rows, in the order of ``order`` (None: that of ``rows``).

        The copy of the changes to the device is queued. Returns the bytes of this copy.
        """
        try:
            places, values = self._changes(rows, order)
            for begin in range(0, len(values), MAX_SENT):
                end = begin + MAX_SENT
                self._send(places[begin:end], values[begin:end])
        except BaseException:
            # The device may lack what the host has noted.
            self._tables = [()] * len(self._tables)
            raise
        return CHANGE_BYTES * len(values)

    def _send(self, places: npt.NDArray[np.int64], values: Sequence[int]) -> None:
        """Queue the copy of changed entries to the device."""
        count = len(values)
        pinned = self.device.device.type == "cuda"
        # Places first: they have the larger alignment.
        changes = torch.empty(CHANGE_BYTES * count, dtype=torch.uint8, pin_memory=pinned)
        array = changes.numpy()
        array[: 8 * count].view(np.int64)[:] = places
        array[8 * count :].view(np.int32)[:] = values
        sent = changes.to(self.device.device, non_blocking=True)
        to, blocks = sent[: 8 * count].view(torch.int64), sent[8 * count :].view(torch.int32)
        self.device.view(-1).scatter_(0, to, blocks)

    def _changes(
        self, rows: Sequence[PlanRow], order: Sequence[int] | None
    ) -> tuple[npt.NDArray[np.int64], list[int]]:
        """Store the tables on the host. Returns the indexes of changed entries, and their
        values."""
        assert len(rows) <= len(self._tables), "a step has at most this number of rows"
        tables = [row.block_table for row in rows]
        if order is not None:
            tables = [tables[number] for number in order]
        width = self.host.shape[1]
        places: list[npt.NDArray[np.int64]] = []
        values: list[int] = []
        for row, (table, before) in enumerate(zip(tables, self._tables, strict=False)):
            if table is before:
                continue
            kept = len(before)
            if table[:kept] != before:
                kept = 0
            # A sequence may have more blocks than its tokens need.
            added = table[kept:width]
            self.host[row, kept : kept + len(added)] = added
            places.append(np.arange(len(added), dtype=np.int64) + (row * width + kept))
            values += added
            self._tables[row] = table
        return np.concatenate(places) if places else np.zeros(0, np.int64), values
