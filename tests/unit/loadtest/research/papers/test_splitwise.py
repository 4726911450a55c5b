"""Splitwise's clusters: costs, requests and objectives."""

from __future__ import annotations

import numpy as np
import pytest

from loadtest.research.papers.paper_tools import quiet_config
from loadtest.research.papers.splitwise import (
    KINDS,
    SplitwiseCosts,
    conversations,
    machine,
    missed,
    slowdowns,
)
from planning.common.traces import Trace, TracedRequest
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.step_model import StepLoad
from planning.simulator.simulation import simulate

TRACE = Trace(tuple(TracedRequest(n * 0.1, 100 + 50 * n, 5 + n) for n in range(40)))


def test_steps_take_what_was_measured_and_lines_between() -> None:
    a100, h100 = SplitwiseCosts("a100"), SplitwiseCosts("h100")
    assert a100.seconds(StepLoad(0, 0, ((1024, 0),))) == pytest.approx(0.1545)
    assert a100.seconds(StepLoad(0, 0, ((768, 0),))) == pytest.approx((0.0930 + 0.1545) / 2)
    assert h100.seconds(StepLoad(48, 48 * 512)) == pytest.approx((0.0387 + 0.0502) / 2)
    # Two prompts count as one of both lengths, sequences that decode with it as a tenth more.
    both = StepLoad(24, 24 * 512, ((500, 0), (500, 0)))
    assert a100.seconds(both) == pytest.approx(1.1 * a100.seconds(StepLoad(0, 0, ((1024, 0),))))
    # Beyond the last batch that was measured time goes on growing.
    assert a100.seconds(StepLoad(96, 96 * 512)) == pytest.approx(0.0716 + 0.0186)


def test_by_the_authors_rule_a_large_batch_takes_as_long_as_one_sequence() -> None:
    flat = SplitwiseCosts("h100", flat=True)
    assert flat.seconds(StepLoad(500, 500 * 512)) == flat.seconds(StepLoad(1, 512)) == 0.0305


@pytest.mark.parametrize("gpu", ["a100", "h100"])
def test_the_fit_is_near_the_measurements(gpu: str) -> None:
    costs = SplitwiseCosts(gpu)
    fitted = costs.step_costs()
    for tokens in (512, 1024, 2048):
        exact_ms = costs.seconds(StepLoad(0, 0, ((tokens, 0),))) * 1e3
        a, _, _ = fitted.prefill
        assert a + fitted.chunk_ms(tokens, 0) == pytest.approx(exact_ms, rel=0.35)
    for batch in (1, 16, 64):
        exact_ms = costs.seconds(StepLoad(batch, batch * 512)) * 1e3
        assert fitted.step_ms(batch, batch * 512) == pytest.approx(exact_ms, rel=0.15)


def test_requests_are_the_same_ones_at_equal_rates_and_as_many_as_asked() -> None:
    once, again = conversations(TRACE, 5.0), conversations(TRACE, 5.0)
    assert once == again
    assert len(once) == 150
    gaps = np.diff([request.arrival_s for request in once])
    assert gaps.mean() == pytest.approx(0.2, rel=0.2)
    # Prompts and answers were drawn apart.
    pairs = {(request.input_tokens, request.output_tokens) for request in once}
    assert not pairs <= {(one.input_tokens, one.output_tokens) for one in TRACE.requests}


def test_a_lone_request_on_an_a100_machine_meets_every_objective() -> None:
    kinds = KINDS["measured"]
    a100, h100 = machine("a100", kinds), machine("h100", kinds)
    one = [TracedRequest(0.0, 1000, 50)]
    for worker, slowest in ((a100, 1.01), (h100, 0.8)):
        shape = ClusterShape(0, 1, worker, worker, paces_chunks=False)
        result = simulate(one, shape, quiet_config())
        assert missed(result, a100.costs) == []
        for ratios in slowdowns(result, a100.costs).values():
            assert ratios.max() <= slowest


def test_what_is_missed_is_named() -> None:
    """Thirty prompts at once wait for one another; sequences that decode with them wait too."""
    worker = machine("a100", KINDS["measured"])
    shape = ClusterShape(0, 1, worker, worker, paces_chunks=False)
    result = simulate([TracedRequest(0.0, 1000, 10)] * 30, shape, quiet_config())
    assert {"TTFT p50", "TTFT p90"} <= set(missed(result, worker.costs))
