"""Formats the results of `baton bench transfer`: rows of a table, and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from baton.errors import ConfigError
from planning.common.report import Machine, whole_table

MIB = 1 << 20
_STEPS = (1, 4, 16, 64, 256, 1024)
"""Sizes of the measured transfers, in MiB."""
_ENOUGH_BYTES = 256 * MIB
_MAX_PAIRS = 60


@dataclass(frozen=True, slots=True)
class TransferRow:
    """Results of one transport at one transfer size, compared with the transport's limit."""

    transport: str
    bytes: int
    gb_per_s: float
    """Bandwidth of the transport in 10^9 bytes per second, from the median time."""
    limit: str
    """Name of the limit with which the transport is compared. Their transfers alternate."""
    limit_gb_per_s: float
    ratio: float
    """Bandwidth of the transport divided by the bandwidth of its limit."""
    ms_p50: float
    """Median time of a transfer in milliseconds: from its start until the receiver has confirmed
    all blocks."""


@dataclass(frozen=True, slots=True)
class EmptyHandoff:
    """Time of a handoff whose blocks are all cached: reserve and commit. Medians, in
    milliseconds."""

    model: str
    idle_ms: float
    busy_ms: float
    """Time of the handoff in milliseconds while the decode worker runs ``batch`` sequences."""
    batch: int
    step_ms: float
    """Time of a decode step of ``batch`` sequences, in milliseconds."""


@dataclass(frozen=True, slots=True)
class TransferReport:
    """All results of one run of `baton bench transfer`."""

    machine: Machine
    block_bytes: int
    rows: tuple[TransferRow, ...]
    empty: EmptyHandoff | None


def sizes_of(block_bytes: int, max_bytes: int) -> tuple[int, ...]:
    """Return the transfer sizes to measure, in bytes: one block, then 1 MiB to 1 GiB, as far as
    they do not exceed ``max_bytes``.

    Sizes are rounded up to whole blocks. Raises ConfigError if a block is larger than
    ``max_bytes``.
    """
    if block_bytes > max_bytes:
        raise ConfigError(f"a block has {block_bytes} bytes, but the maximum is {max_bytes}")
    wanted = [step * MIB for step in _STEPS if step * MIB <= max_bytes]
    whole = {-(-size // block_bytes) * block_bytes for size in wanted}
    return tuple(sorted({block_bytes, *whole}))


def pairs_of(size: int, least: int) -> int:
    """Return how often a transfer of ``size`` bytes is repeated. It is at least ``least``. Small
    transfers are repeated more often, because their times vary more.
    """
    return max(least, min(_MAX_PAIRS, _ENOUGH_BYTES // size))


def row_of(
    transport: str, size: int, limit: str, seconds: Sequence[float], limit_seconds: Sequence[float]
) -> TransferRow:
    """Return the row of a transport at one size. ``seconds`` are the times of its transfers, and
    ``limit_seconds`` those of the limit's transfers.
    """
    took, least = statistics.median(seconds), statistics.median(limit_seconds)
    return TransferRow(
        transport=transport,
        bytes=size,
        gb_per_s=size / took / 1e9,
        limit=limit,
        limit_gb_per_s=size / least / 1e9,
        ratio=least / took,
        ms_p50=took * 1e3,
    )


def draw(rows: Sequence[TransferRow]) -> Table:
    """Return a table with one line for each transport and transfer size."""
    table = whole_table(
        *("transport", "bytes", "p50, ms", "GB/s", "limit", "its GB/s", "ratio"),
        title="Blocks into a block pool of another process, with checksums",
    )
    for row in rows:
        table.add_row(
            row.transport,
            f"{row.bytes:,}",
            f"{row.ms_p50:.2f}",
            f"{row.gb_per_s:.2f}",
            row.limit,
            f"{row.limit_gb_per_s:.2f}",
            f"{row.ratio:.0%}",
        )
    return table


def lines_of(report: TransferReport) -> list[str]:
    """Return the lines of text that are printed below the table of transfers."""
    said = [f"Medians. Blocks of {report.block_bytes:,} bytes. {report.machine.line()}."]
    if report.empty is not None:
        empty = report.empty
        said.append(
            f"Empty handoff ({empty.model}): {empty.idle_ms:.2f} ms idle, {empty.busy_ms:.2f} ms"
            f" during a batch of {empty.batch}, whose step takes {empty.step_ms:.1f} ms."
        )
    return said


def as_json(report: TransferReport) -> str:
    """Return the report as JSON: its rows, the empty handoff and the machine.

    ``empty_handoff_ms_p50`` and ``empty_handoff_busy_ms_p50`` are null if they were not measured.
    """
    empty = report.empty
    fields = {
        "machine": asdict(report.machine),
        "block_bytes": report.block_bytes,
        "rows": [asdict(row) for row in report.rows],
        "empty_handoff_ms_p50": None if empty is None else empty.idle_ms,
        "empty_handoff_busy_ms_p50": None if empty is None else empty.busy_ms,
        "empty_handoff": None if empty is None else asdict(empty),
    }
    return json.dumps(fields, indent=1) + "\n"
