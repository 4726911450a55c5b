"""A simulation's figures."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.simulator.results import RequestResult, SimulationResult
from loadtest.simulator.summary import is_good, percentiles, summary
from tests.unit.loadtest.simulator.clusters import config, shape


def request(
    number: int, ttft_s: float = 0.5, gap_s: float = 0.01, tokens: int = 5, code: str = ""
) -> RequestResult:
    first = number + ttft_s
    times = first + gap_s * np.arange(tokens, dtype=np.float64)
    return RequestResult(
        number=number,
        input_tokens=100 + 100 * (number % 2),
        output_tokens=tokens,
        arrival_s=float(number),
        sent_s=float(number),
        first_token_s=first if tokens else None,
        ended_s=float(times[-1]) if tokens else float(number),
        code=code,
        prefill="prefill-0",
        decode="decode-1",
        cached_tokens=50,
        preemptions=0,
        token_times_s=times,
    )


def test_good_requests_met_every_slo() -> None:
    asked = config()
    assert is_good(request(0), asked)
    assert is_good(request(0, tokens=1), asked)
    assert not is_good(request(0, ttft_s=2.5), asked)
    assert not is_good(request(0, gap_s=0.031), asked)
    assert not is_good(request(0, code="overloaded"), asked)


def test_what_was_shed_or_failed_counts_as_bad() -> None:
    requests = (
        request(0),
        request(1, ttft_s=0.7),
        request(2, code="overloaded", tokens=0),
        request(3, code="deadline_exceeded", tokens=2),
        request(10, ttft_s=3.0),
    )
    figures = summary(SimulationResult(requests, (), 14.0), shape(1, 1), config())
    assert figures["goodput_per_s"] == pytest.approx(2 / 10)
    assert figures["goodput_per_gpu_s"] == pytest.approx(1 / 10)
    assert figures["slo_attainment"] == pytest.approx(2 / 5)
    assert (figures["ok"], figures["shed"], figures["failed"]) == (3, 1, 1)
    assert figures["codes"] == {"deadline_exceeded": 1, "overloaded": 1}
    assert figures["latency"]["ttft_s"]["p50"] == pytest.approx(0.7)
    assert figures["latency"]["tpot_s"]["p95"] == pytest.approx(0.01)
    assert figures["classes"]["short"]["requests"] == 3
    assert figures["classes"]["long"]["ttft_s"]["p99"] == pytest.approx(0.7)
    assert figures["cached_input_share"] == pytest.approx(250 / 700)


def test_percentiles_of_nothing_are_null() -> None:
    nothing = {"p50": None, "p95": None, "p99": None, "mean": None}
    assert percentiles(np.empty(0)) == nothing
    assert percentiles(np.array([np.nan])) == nothing


def test_percentiles_lie_between_neighbours() -> None:
    found = percentiles(np.array([1.0, 2.0, 3.0, 4.0, np.nan]))
    assert found["p50"] == pytest.approx(2.5)
    assert found["p99"] == pytest.approx(3.97)
