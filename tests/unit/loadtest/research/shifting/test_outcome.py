"""What became of the traffic, in a table."""

from __future__ import annotations

from array import array

import pytest

from loadtest.generator.results.request_record import RequestRecord
from loadtest.research.shifting.outcome import AUTOSCALED, Outcome, gain, outcome, table_of
from loadtest.research.shifting.scenario import ShiftingTraffic
from planning.common.slo import Slo

TRAFFIC = ShiftingTraffic(1.0, 10.0)


def record(number: int, due_s: float, ttft_s: float = 0.1, code: str = "") -> RequestRecord:
    return RequestRecord(
        number=number,
        due_s=due_s,
        sent_s=due_s,
        ended_s=due_s + ttft_s + 0.1,
        outcome="shed" if code else "ok",
        code=code,
        output_tokens=2,
        token_times_s=array("d", () if code else (due_s + ttft_s, due_s + ttft_s + 0.1)),
    )


def named(name: str, goodput_per_s: float) -> Outcome:
    return Outcome(name, 10, 5, 0, 0, goodput_per_s, (0.5, 0.5, 0.5))


def test_all_requests_count_and_each_phase_is_shown() -> None:
    records = [
        *(record(n, 1.0 + n) for n in range(2)),
        *(record(n, 5.0 + n, 0.1 if n % 2 else 3.0) for n in range(2, 6)),
        record(6, 16.0, code="overloaded"),
    ]
    found = outcome("3P3D", records, TRAFFIC, Slo(1.0, 0.2), 0.004)
    assert (found.requests, found.good, found.refused, found.failed) == (7, 4, 1, 0)
    assert found.by_phase == (1.0, 0.5, 0.0)
    assert found.goodput_per_s == pytest.approx(4 / TRAFFIC.seconds)
    assert found.late_ms == pytest.approx(4)
    assert table_of([found], TRAFFIC, "").row_count == 1


def test_the_gain_is_over_the_best_fixed_ratio() -> None:
    found = [named("1P5D", 2.0), named("5P1D", 3.0), named(AUTOSCALED, 4.5)]
    assert gain(found) == 1.5
    assert gain([named("1P5D", 0.0), named(AUTOSCALED, 1.0)]) == float("inf")
