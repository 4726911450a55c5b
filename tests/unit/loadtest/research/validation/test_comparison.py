from __future__ import annotations

from array import array

import pytest

from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.workload.lengths import Lengths
from loadtest.research.validation.comparison import Figure, compare
from loadtest.research.validation.offered_load import OfferedLoad
from planning.common.slo import Slo

LOAD = OfferedLoad(1.0, 10.0, Lengths.parse("10"), Lengths.parse("3"), "constant")


def record(number: int, due_s: float, ttft_s: float, tpot_s: float) -> RequestRecord:
    first = due_s + ttft_s
    times = array("d", [first, first + tpot_s, first + 2 * tpot_s])
    return RequestRecord(
        number, due_s, due_s, times[-1], "ok", input_tokens=10, output_tokens=3, token_times_s=times
    )


def test_a_figure_is_met_within_its_aim() -> None:
    assert Figure("TTFT p50", 114.0, 100.0, 0.15).is_met
    assert not Figure("TTFT p50", 84.0, 100.0, 0.15).is_met
    assert Figure("goodput/s", 0.0, 0.0, 0.1).error == 0.0
    assert not Figure("goodput/s", 1.0, 0.0, 0.1).is_met


def test_both_are_summarized_alike_without_the_first_tenth() -> None:
    said = [record(n, float(n), 0.2, 0.05) for n in range(10)]
    seen = [record(n, float(n), 0.25 if n else 9.0, 0.04) for n in range(10)]
    found = compare("1P1D", LOAD, Slo(0.22, 1.0), said, seen, 0.003)
    figures = {figure.name: figure for figure in found.figures}
    assert found.requests == 9
    assert figures["TTFT p95"].measured == pytest.approx(250)
    assert figures["TTFT p50"].error == pytest.approx(-0.2)
    assert figures["TPOT p95"].error == pytest.approx(0.25)
    assert figures["goodput/s"].predicted == pytest.approx(1.0)
    assert figures["goodput/s"].measured == 0.0
    assert found.attainment == (1.0, 0.0)
    assert found.late_ms == pytest.approx(3.0)
