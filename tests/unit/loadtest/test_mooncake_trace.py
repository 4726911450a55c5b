"""Reading traces."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from baton.errors import ConfigError
from loadtest.mooncake_trace import TraceRow, read_trace, scaled

GOOD = {"timestamp": 1500, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}


def write(path: Path, *rows: object, pack: bool = False) -> Path:
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if pack else text.encode())
    return path


@pytest.mark.parametrize("pack", [False, True])
def test_rows_are_read_in_the_order_of_their_times(tmp_path: Path, *, pack: bool) -> None:
    later = GOOD | {"timestamp": 2000.5, "session_id": 12}
    found = read_trace(write(tmp_path / "trace", later, "", GOOD, pack=pack))
    assert found == [TraceRow(1.5, 1000, (0, 7)), TraceRow(2.0005, 1000, (0, 7), "12")]


def test_lengths_are_divided_and_rounded_up() -> None:
    rows = scaled([TraceRow(0.0, 1000, (1,)), TraceRow(0.0, 0, ())], 32)
    assert [(row.prompt_tokens, row.hash_ids) for row in rows] == [(32, (1,)), (1, ())]


def test_equal_leading_numbers_are_equal_leading_hashes() -> None:
    one = TraceRow(0.0, 1, (5, 6, 2**64 - 1)).hashes()
    other = TraceRow(0.0, 1, (5, 6, 2**32 - 1, 9)).hashes()
    assert len(one) == 3
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    # Chained: the same number behind another one is another block.
    assert TraceRow(0.0, 1, (6,)).hashes() != one[1:2]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 2"),
        ("[1]", "line 2: a row is a JSON object"),
        ({"input_length": 1, "hash_ids": []}, "line 2: timestamp must be"),
        (GOOD | {"timestamp": -1}, "timestamp must be"),
        ('{"timestamp": NaN, "input_length": 1, "hash_ids": []}', "timestamp must be"),
        (GOOD | {"input_length": 1.5}, "input_length must be"),
        (GOOD | {"input_length": True}, "input_length must be"),
        (GOOD | {"hash_ids": None}, "hash_ids must be"),
        (GOOD | {"hash_ids": [1, "2"]}, "hash_ids must be"),
        (GOOD | {"hash_ids": [-1]}, "hash_ids must be"),
    ],
)
def test_a_row_at_fault_is_named(tmp_path: Path, row: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(write(tmp_path / "trace.jsonl", GOOD, row))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")
    with pytest.raises(ConfigError, match="has no rows"):
        read_trace(write(tmp_path / "empty", ""))
    broken = tmp_path / "broken.gz"
    broken.write_bytes(write(tmp_path / "whole.gz", GOOD, pack=True).read_bytes()[:-9])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(broken)
