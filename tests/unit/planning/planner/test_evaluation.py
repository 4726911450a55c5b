"""Candidates are simulated once, and what counts is separate from the warm-up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planning.common.traces import Trace
from planning.planner.cluster_kind import Counts
from planning.planner.evaluation import Trial
from planning.planner.plan import Figures, together
from tests.support.loadtest.plans import KIND, config, evaluation, trace

ONE = Counts(1, 1)


def test_each_candidate_is_simulated_once() -> None:
    heard: list[Trial] = []
    tried = evaluation(peak_s=0.0)
    tried._listen = heard.append
    first = tried.figures(KIND, ONE, "whole")
    # The peak is all of it.
    assert tried.figures(KIND, ONE, "peak") is first
    assert tried.simulations == 1
    assert [one.figures for one in heard] == [None, first]
    assert heard[1].text().startswith("1: 1 + 1 of small + small, auto, whole: ")
    assert tried.figures(KIND, Counts(2, 1), "whole") is not first
    assert tried.simulations == len(tried.trials) == 2
    assert tried.requests == 80


def test_the_lead_does_not_count() -> None:
    busy = [replace(one, arrival_s=3.0 + one.arrival_s / 2) for one in trace(60).requests]
    tried = evaluation(Trace((*trace(60).requests, *busy), 32), peak_s=0.5)
    found = tried.figures(KIND, Counts(3, 3), "peak")
    assert found.requests == len(tried.traffic["peak"][0].counted) < 25
    assert tried.requests > found.requests
    assert found.attainment == 1.0
    assert found.input_tokens == 300 * found.requests
    assert found.offered_per_s == pytest.approx(40, rel=0.1)


def test_twice_the_peak_is_twice_the_rate() -> None:
    tried = evaluation()
    peak, twice = (tried.figures(KIND, ONE, extent) for extent in ("peak", "twice the peak"))
    assert twice.requests == peak.requests
    assert twice.offered_per_s == pytest.approx(2 * peak.offered_per_s)
    assert twice.attainment < peak.attainment


def test_seeds_repeat() -> None:
    assert evaluation().figures(KIND, ONE, "whole") == evaluation().figures(KIND, ONE, "whole")


def test_of_several_traces_the_worst_counts() -> None:
    easy, hard = trace(20, 0.5), trace(40, 0.02)
    both = evaluation(easy, hard).figures(KIND, ONE, "whole")
    alone = [evaluation(one).figures(KIND, ONE, "whole") for one in (easy, hard)]
    assert both.attainment == alone[1].attainment < alone[0].attainment
    assert both.requests == 60
    assert both.good == alone[0].good + alone[1].good
    assert both.ttft_p95_s == alone[1].ttft_p95_s
    assert both.seconds == pytest.approx(19 * 0.5 + 39 * 0.02)


def test_each_request_is_good_or_has_a_reason() -> None:
    found = evaluation(trace(60, 0.02)).figures(KIND, ONE, "whole")
    bad = found.requests - found.good
    assert bad > 0
    late = (found.missed_ttft + found.missed_tpot) * found.requests
    assert bad <= found.shed + found.failed + late + 1e-9


def test_prices_of_tokens() -> None:
    found = _figures(input_tokens=2_000_000, seconds=1800.0)
    # Half an hour of four dollars an hour, for two million.
    assert found.dollars_per_million(4.0, found.input_tokens) == pytest.approx(1.0)
    assert found.dollars_per_million(4.0, 0) is None


def test_utilization_of_several_traces_is_weighed_by_time() -> None:
    both = together(
        [_figures(seconds=100.0, mfu=0.5), _figures(seconds=300.0, mfu=0.1), _figures(mfu=None)]
    )
    assert both.prefill_mfu == pytest.approx(0.2)
    assert both.decode_mbu is None


def _figures(*, input_tokens: int = 1, seconds: float = 10.0, mfu: float | None = None) -> Figures:
    return Figures(
        requests=10,
        good=9,
        shed=1,
        failed=0,
        input_tokens=input_tokens,
        output_tokens=1,
        seconds=seconds,
        attainment=0.9,
        ttft_p95_s=1.0,
        tpot_p95_s=None,
        missed_ttft=0.0,
        missed_tpot=0.0,
        prefill_busy=None,
        decode_busy=0.1,
        prefill_mfu=mfu,
        decode_mbu=None,
    )


def test_the_configuration_is_the_one_that_was_given() -> None:
    settings = config(ttft_s=1e-6)
    found = evaluation(settings=settings).figures(KIND, ONE, "whole")
    assert found.attainment == 0.0
