"""Traces of arrivals: what is read, what is refused, and how they are sped up."""

from __future__ import annotations

import gzip
import itertools
from pathlib import Path

import pytest

from baton.errors import ConfigError
from loadtest.arrivals import Arrival, at_rate, read_arrivals

TEXT = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.6805900,396,1
2023-11-16 18:15:51.1805900,0,109
"""


def test_rows(tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.csv", tmp_path / "t.csv.gz"
    plain.write_text(TEXT)
    packed.write_bytes(gzip.compress(TEXT.encode()))
    found = read_arrivals(plain, 8)
    assert found == (Arrival(0.0, 47, 6), Arrival(4.0, 50, 1), Arrival(4.5, 1, 14))
    assert read_arrivals(packed, 8) == found


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "has no columns"),
        (b"a,b\n1,2\n", "has no columns"),
        (TEXT.replace("396", "many").encode(), "line 3"),
        (TEXT.replace("2023-11-16 18:15:50.6805900", "noon").encode(), "line 3"),
        (TEXT.replace(",396,1", "").encode(), "line 3"),
        (TEXT.splitlines()[0].encode(), "fewer than two"),
        (b"\x1f\x8b broken", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_arrivals(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_arrivals(tmp_path / "absent.csv")


def test_the_rate_is_what_was_asked_for() -> None:
    trace = tuple(Arrival(at * at, at + 1, 1) for at in range(10))
    rows = list(at_rate(trace, 5.0, 10.0))
    assert len(rows) == 50
    assert rows[0].at_s == 0
    assert all(a.at_s <= b.at_s for a, b in itertools.pairwise(rows))
    assert rows[-1].at_s < 10.0
    assert [row.prompt_tokens for row in rows[8:12]] == [9, 10, 1, 2]
