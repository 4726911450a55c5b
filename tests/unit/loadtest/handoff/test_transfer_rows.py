"""Figures of `baton bench transfer`, without measuring any."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from baton.errors import ConfigError
from loadtest.handoff.transfer_rows import (
    MIB,
    EmptyHandoff,
    TransferReport,
    as_json,
    draw,
    lines_of,
    pairs_of,
    row_of,
    sizes_of,
)
from planning.common.report import print_whole, this_machine, write_json

BLOCK = 360 << 10
EMPTY = EmptyHandoff("tiny", idle_ms=1.25, busy_ms=2.5, batch=63, step_ms=40.0)


def test_sizes_are_whole_blocks_and_reach_what_they_stand_for() -> None:
    sizes = sizes_of(BLOCK, 1 << 30)
    assert sizes[0] == BLOCK
    assert [size // BLOCK for size in sizes] == [1, 3, 12, 46, 183, 729, 2913]
    assert sizes[-1] >= 1 << 30
    assert all(size % BLOCK == 0 for size in sizes)
    assert list(sizes) == sorted(sizes)


def test_sizes_end_at_the_most() -> None:
    assert sizes_of(4096, 4 * MIB) == (4096, MIB, 4 * MIB)
    assert sizes_of(MIB, MIB) == (MIB,)
    assert sizes_of(MIB, MIB + 1) == (MIB,)
    with pytest.raises(ConfigError, match="a block has 2097152 bytes"):
        sizes_of(2 * MIB, MIB)


def test_small_sizes_are_moved_more_often() -> None:
    assert pairs_of(BLOCK, 5) == 60
    assert pairs_of(16 * MIB, 5) == 16
    assert pairs_of(1 << 30, 5) == 5
    assert pairs_of(BLOCK, 100) == 100


def test_a_row_holds_medians_and_their_ratio() -> None:
    row = row_of("shm", 4_000_000, "memcpy", [0.004, 0.1, 0.002], [0.001, 0.002, 0.003])
    assert (row.transport, row.limit, row.bytes) == ("shm", "memcpy", 4_000_000)
    assert row.gb_per_s == pytest.approx(1.0)
    assert row.limit_gb_per_s == pytest.approx(2.0)
    assert row.ratio == pytest.approx(row.gb_per_s / row.limit_gb_per_s)
    assert row.ms_p50 == pytest.approx(4.0)


def test_the_json_has_the_promised_fields(tmp_path: Path) -> None:
    row = row_of("grpc", 16 * MIB, "grpcio", [0.02], [0.01])
    report = TransferReport(this_machine(), BLOCK, (row,), EMPTY)
    path = tmp_path / "figures.json"
    write_json(path, as_json(report))
    found = json.loads(path.read_text())
    assert found["empty_handoff_ms_p50"] == 1.25
    assert found["empty_handoff_busy_ms_p50"] == 2.5
    promised = {"transport", "bytes", "gb_per_s", "limit", "limit_gb_per_s", "ratio"}
    assert promised <= found["rows"][0].keys()
    assert found["rows"][0]["ratio"] == 0.5
    assert found["machine"]["cores"] >= 1


def test_what_was_not_measured_is_null() -> None:
    found = json.loads(as_json(TransferReport(this_machine(), BLOCK, (), None)))
    assert found["rows"] == []
    assert found["empty_handoff_ms_p50"] is None
    assert found["empty_handoff_busy_ms_p50"] is None


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        write_json(tmp_path / "none" / "figures.json", "{}")


def test_the_table_and_the_lines_below_it() -> None:
    row = row_of("shm", 16 * MIB, "memcpy", [0.004], [0.002])
    console = Console(width=200, record=True)
    print_whole(console, draw([row]))
    drawn = console.export_text()
    assert "16,777,216" in drawn
    assert "50%" in drawn
    lines = lines_of(TransferReport(this_machine(), BLOCK, (row,), EMPTY))
    assert lines[-1] == (
        "Empty handoff (tiny): 1.25 ms idle, 2.50 ms during a batch of 63,"
        " whose step takes 40.0 ms."
    )
    assert len(lines_of(TransferReport(this_machine(), BLOCK, (row,), None))) == 1
