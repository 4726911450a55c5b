"""Each way to copy has a rate."""

from __future__ import annotations

from loadtest.research.timings.mac_bench import measure


def test_each_way_has_a_rate() -> None:
    found = measure(8 << 10, 64 << 10, 2)
    assert set(found) == {"numpy copy", "copy + checksum", "copy + MAC", "MAC alone"}
    assert min(found.values()) > 0
