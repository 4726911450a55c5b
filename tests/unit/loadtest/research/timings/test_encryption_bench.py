"""Each way to bring parts over has a rate, and the encrypted one brings them over."""

from __future__ import annotations

from loadtest.research.timings.encryption_bench import measure


def test_each_way_has_a_rate() -> None:
    found = measure(8 << 10, 64 << 10, 2)
    assert list(found) == ["numpy copy", "copy + checksum", "encrypt", "decrypt"]
    assert min(found.values()) > 0
