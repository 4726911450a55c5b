from __future__ import annotations

import time

import pytest

from deploy.models.hub_download import Meter, size_text


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_progress_is_bytes_speed_and_time_left(clock: list[float]) -> None:
    meter = Meter({"a": 6_000_000_000, "b": 4_000_000_000})
    clock[0] += 10
    meter.has("a", 1_000_000_000)
    assert meter.report() == "1.0 GB of 10.0 GB (10%), 100.0 MB/s, 1 min 30 s left"
    clock[0] += 90
    assert meter.report() == "1.0 GB of 10.0 GB (10%), no progress for 90 s"


def test_two_bars_of_a_file_are_counted_once(clock: list[float]) -> None:
    meter = Meter({"a": 1000, "b": 1000})
    for count in (400, 300, 700, 2000):
        meter.has("a", count)
    assert (meter.got, meter.total) == (1000, 2000)


def test_an_empty_file_has_no_percentage_to_divide_by(clock: list[float]) -> None:
    assert "(0%)" in Meter({"a": 0}).report()


@pytest.mark.parametrize(
    ("count", "text"),
    [(15_234_000_000, "15.2 GB"), (3_140_000, "3.1 MB"), (519, "0.5 kB"), (0, "0.0 kB")],
)
def test_sizes_are_in_powers_of_1000(count: int, text: str) -> None:
    assert size_text(count) == text
