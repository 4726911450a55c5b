"""Traces: what is read, what is refused, and how they are scaled."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.errors import ConfigError
from planning.common.traces import Trace, TracedRequest, read_trace

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,1
2023-11-16 18:15:51.1805900,0,109
"""
GOOD = {"timestamp": 1500, "input_length": 1000, "output_length": 5, "hash_ids": [0, 7]}


def write(path: Path, text: str, *, pack: bool = False) -> Path:
    path.write_bytes(gzip.compress(text.encode()) if pack else text.encode())
    return path


def lines(*rows: object) -> str:
    return "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n"


@pytest.mark.parametrize("pack", [False, True])
def test_azure(tmp_path: Path, *, pack: bool) -> None:
    found = read_trace(write(tmp_path / "trace", AZURE, pack=pack))
    assert found.requests == (
        TracedRequest(0.0, 374, 44),
        TracedRequest(4.0, 396, 1),
        TracedRequest(4.5, 1, 109),
    )
    assert found.span_s == 4.5


@pytest.mark.parametrize("pack", [False, True])
def test_mooncake_in_the_order_of_its_times(tmp_path: Path, *, pack: bool) -> None:
    later = GOOD | {"timestamp": 2000.0, "session_id": 12}
    bare = {"timestamp": 1750, "input_length": 0, "output_length": 0}
    found = read_trace(write(tmp_path / "trace", lines(later, "", GOOD, bare), pack=pack))
    assert found.requests == (
        TracedRequest(0.0, 1000, 5, (0, 7)),
        TracedRequest(0.25, 1, 1),
        TracedRequest(0.5, 1000, 5, (0, 7), "12"),
    )
    assert found.block_tokens == 512


def test_scales_divide(tmp_path: Path) -> None:
    found = read_trace(write(tmp_path / "trace", AZURE), scale_time=2, scale_length=8)
    assert found.requests == (
        TracedRequest(0.0, 47, 6),
        TracedRequest(2.0, 50, 1),
        TracedRequest(2.25, 1, 14),
    )
    packed = Trace((TracedRequest(0.0, 1000, 64, (1, 2)),)).scaled(1, 32)
    assert packed == Trace((TracedRequest(0.0, 32, 2, (1, 2)),), block_tokens=16)
    # As published: as many blocks as numbers, whatever the length.
    assert Trace((TracedRequest(0.0, 1, 1),)).scaled(1, 1e6).block_tokens == 1


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_are_above_zero(tmp_path: Path, scale: float) -> None:
    path = write(tmp_path / "trace", AZURE)
    with pytest.raises(ConfigError, match="scale of time"):
        read_trace(path, scale_time=scale)
    with pytest.raises(ConfigError, match="scale of length"):
        read_trace(path, scale_length=scale)


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 4096))
def test_what_is_too_long_is_cut(prompt: int, answer: int, most: int) -> None:
    (cut,) = Trace((TracedRequest(0.0, prompt, answer),)).within(most).requests
    assert 1 <= cut.input_tokens <= prompt
    assert 1 <= cut.output_tokens <= answer
    assert cut.input_tokens + cut.output_tokens <= most
    if prompt + answer <= most and answer <= most // 2:
        assert (cut.input_tokens, cut.output_tokens) == (prompt, answer)


def test_the_rate_is_what_was_asked_for() -> None:
    trace = Trace(tuple(TracedRequest(float(at * at), at + 1, 1) for at in range(10)))
    rows = list(trace.at_rate(5.0, 10.0))
    assert len(rows) == 50
    assert rows[0].arrival_s == 0
    assert all(a.arrival_s <= b.arrival_s for a, b in itertools.pairwise(rows))
    assert rows[-1].arrival_s < 10.0
    assert [row.input_tokens for row in rows[8:12]] == [9, 10, 1, 2]


def test_what_came_at_once_has_no_rate() -> None:
    trace = Trace((TracedRequest(0.0, 1, 1), TracedRequest(0.0, 2, 1)))
    with pytest.raises(ConfigError, match="arrive at the same time"):
        list(trace.at_rate(1.0, 1.0))


@given(st.lists(st.integers(0, 1 << 20), min_size=1), st.floats(0.01, 100), st.integers(1, 1 << 10))
def test_scaled_lengths_stay_above_zero_and_in_order(
    lengths: list[int], scale_time: float, scale_length: int
) -> None:
    trace = Trace(tuple(TracedRequest(float(at), max(1, one), 1) for at, one in enumerate(lengths)))
    scaled = trace.scaled(scale_time, scale_length)
    for before, after in zip(trace.requests, scaled.requests, strict=True):
        assert after.arrival_s == pytest.approx(before.arrival_s / scale_time)
        assert after.input_tokens == max(1, -(-before.input_tokens // scale_length))
        assert after.output_tokens == 1


def test_equal_leading_numbers_are_equal_leading_hashes() -> None:
    one = TracedRequest(0.0, 1, 1, (5, 6, 2**64 - 1)).chained_hashes()
    other = TracedRequest(0.0, 1, 1, (5, 6, 2**32 - 1, 9)).chained_hashes()
    assert len(one) == 3
    assert one[:2] == other[:2]
    assert one[2] != other[2]
    # Chained: the same number behind another one is another block.
    assert TracedRequest(0.0, 1, 1, (6,)).chained_hashes() != one[1:2]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 2"),
        ("[1]", "line 2: a row must be a JSON object"),
        ({"input_length": 1, "output_length": 1}, "line 2: timestamp must be"),
        (GOOD | {"timestamp": -1}, "timestamp must be"),
        (GOOD | {"timestamp": True}, "timestamp must be"),
        ('{"timestamp": NaN, "input_length": 1, "output_length": 1}', "timestamp must be"),
        (GOOD | {"input_length": 1.5}, "input_length must be"),
        (GOOD | {"input_length": True}, "input_length must be"),
        (GOOD | {"output_length": -1}, "output_length must be"),
        ({"timestamp": 1, "input_length": 1}, "output_length must be"),
        (GOOD | {"hash_ids": None}, "hash_ids must be"),
        (GOOD | {"hash_ids": [1, "2"]}, "hash_ids must be"),
        (GOOD | {"hash_ids": [-1]}, "hash_ids must be"),
    ],
)
def test_a_row_of_mooncake_at_fault_is_named(tmp_path: Path, row: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read_trace(write(tmp_path / "trace.jsonl", lines(GOOD, row)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a trace"),
        (b"a,b\n1,2\n", "is not a trace"),
        (AZURE.replace("396", "many").encode(), "line 3"),
        (AZURE.replace("396", "-1").encode(), "line 3: ContextTokens"),
        (AZURE.replace("2023-11-16 18:15:50.6805900", "noon").encode(), "line 3"),
        (AZURE.replace(",396,1", "").encode(), "line 3"),
        (AZURE.splitlines()[0].encode(), "has no rows"),
        (b"\x1f\x8b broken", "cannot read"),
        (gzip.compress(AZURE.encode())[:-9], "cannot read"),
        (b"\xff\xfe", "cannot read"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(tmp_path / "absent.csv")
