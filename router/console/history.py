"""The console's last ten minutes: figures of the cluster, and the load of each worker.

A page shows them after a reload. Plain data, bounded, no clock: times are those of snapshots, in
Unix seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from router.console.snapshot import Figures, Snapshot, WorkerView

KEPT_S = 600.0
POINT_S = 2.0
"""Minimum time between two points of the figures, in seconds."""
_JITTER_S = 0.2
"""Time by which a point may come early, in seconds, since snapshots are not exactly punctual."""
COLUMN_S = 10.0
"""Time that a column of the heat map covers, in seconds."""
MAX_WORKERS = 512
"""Maximum number of workers in a column of the heat map, in the console's order."""


@dataclass(slots=True)
class _Cell:
    """Means over the snapshots of a worker in a column."""

    samples: int = 0
    batch_fill: float = 0.0
    kv_used: float = 0.0
    step_ms: float = 0.0

    def add(self, worker: WorkerView) -> None:
        self.samples += 1
        part = 1 / self.samples
        self.batch_fill += (worker.batch_fill - self.batch_fill) * part
        used = worker.used_blocks / worker.total_blocks if worker.total_blocks else 0.0
        self.kv_used += (used - self.kv_used) * part
        self.step_ms += (worker.step_ms - self.step_ms) * part

    def row(self) -> tuple[int, float, float, float]:
        return (
            self.samples,
            round(self.batch_fill, 3),
            round(self.kv_used, 3),
            round(self.step_ms, 2),
        )


@dataclass(slots=True)
class _Column:
    at: float
    cells: dict[str, _Cell] = field(default_factory=dict)


class History:
    """The figures of the last ``KEPT_S`` seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, Figures]] = deque()
        self._columns: deque[_Column] = deque()

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot, which is later than those before."""
        now = snapshot.at
        if not self._points or now - self._points[-1][0] >= POINT_S - _JITTER_S:
            self._points.append((now, snapshot.figures))
        while now - self._points[0][0] > KEPT_S:
            self._points.popleft()
        self._add_column(now - now % COLUMN_S, snapshot.workers)

    def _add_column(self, at: float, workers: Sequence[WorkerView]) -> None:
        if not self._columns or at > self._columns[-1].at:
            self._columns.append(_Column(at))
        while at - self._columns[0].at >= KEPT_S:
            self._columns.popleft()
        cells = self._columns[-1].cells
        for worker in workers[:MAX_WORKERS]:
            if worker.slot in cells or len(cells) < MAX_WORKERS:
                cells.setdefault(worker.slot, _Cell()).add(worker)

    def shown(self) -> dict[str, Any]:
        """Return the history for a page, as plain data.

        ``points``: the figures, each with its time. ``columns``: for each ten seconds and worker,
        the number of snapshots and the means of batch fill, KV in use (both 0 … 1) and step time in
        milliseconds.
        """
        return {
            "points": [{"at": at, **asdict(figures)} for at, figures in self._points],
            "column_s": COLUMN_S,
            "columns": [
                {"at": one.at, "workers": {slot: cell.row() for slot, cell in one.cells.items()}}
                for one in self._columns
            ],
        }
