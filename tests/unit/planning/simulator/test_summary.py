"""A simulation's figures."""

from __future__ import annotations

import numpy as np
import pytest

from planning.common.traces import TracedRequest
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.analytical_costs import Efficiency
from planning.simulator.costs.hardware import ACCELERATORS
from planning.simulator.costs.model_shape import MODELS
from planning.simulator.costs.worker_profile import gpu_profile
from planning.simulator.results import RequestResult, SimulationResult
from planning.simulator.simulation import simulate
from planning.simulator.summary import is_good, percentiles, summary
from tests.support.loadtest.clusters import config, shape


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


# 0.6 of the arithmetic, 0.7 of the bandwidth, and nothing else takes time.
STATED = Efficiency(products=0.6, attention=0.6, memory=0.7, wire=1.0, launch_s=0.0)
LLAMA, H100 = MODELS["llama-3.1-8b"], ACCELERATORS["h100"]


def lone_request(*, leaps: bool = True) -> tuple[SimulationResult, ClusterShape]:
    """4096 tokens in one chunk, then 1001 steps of one sequence."""
    worker = gpu_profile("h100", LLAMA, STATED)
    both = ClusterShape(1, 1, worker, worker)
    return simulate([TracedRequest(0.0, 4096, 1002)], both, config(), leaps=leaps), both


def test_a_pool_that_is_bound_by_one_peak_reaches_the_stated_share_of_it() -> None:
    result, both = lone_request()
    pools = summary(result, both, config())["pools"]
    # A long chunk is arithmetic alone, a step of one sequence bytes alone.
    assert pools["prefill"]["mfu_busy"] == pytest.approx(0.6)
    assert pools["decode"]["mbu_busy"] == pytest.approx(0.7)


def test_work_is_what_one_counts_by_hand() -> None:
    result, both = lone_request()
    pools = summary(result, both, config())["pools"]
    prefill, decode = (worker.work for worker in result.workers)
    layers = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    head, pair = 128256 * 4096, 4 * 32 * 32 * 128
    prompt = 2 * (layers * 4096 + head) + pair * 4096 * 4097 / 2
    assert prefill.flops == pytest.approx(prompt)
    # The first token came from the prompt; each further one is computed with all before it.
    contexts = sum(range(4097, 4097 + 1001))
    assert decode.flops == pytest.approx(1001 * 2 * (layers + head) + pair * contexts)
    kv = 2 * 32 * 8 * 128 * 2
    assert decode.memory_bytes == pytest.approx(1001 * 2 * (layers + head) + kv * contexts)
    mfu = decode.flops / decode.busy_s / H100.flops
    assert pools["decode"]["mfu_busy"] == pytest.approx(mfu)
    assert mfu < 0.01
    for role, pool in pools.items():
        for name in ("mfu", "mbu"):
            over_wall = pool[f"{name}_busy"] * pool["busy_share"]
            assert pool[f"{name}_wall"] == pytest.approx(over_wall), role


def test_leaps_count_the_work_of_every_step() -> None:
    leapt, single = (lone_request(leaps=leaps)[0] for leaps in (True, False))
    for one, other in zip(leapt.workers, single.workers, strict=True):
        assert one.work.flops == pytest.approx(other.work.flops)
        assert one.work.memory_bytes == pytest.approx(other.work.memory_bytes)


def test_profiles_that_were_measured_have_no_peak() -> None:
    result = simulate([TracedRequest(0.0, 100, 10)], shape(1, 1), config())
    pools = summary(result, shape(1, 1), config())["pools"]
    for pool in pools.values():
        names = ("mfu_busy", "mfu_wall", "mbu_busy", "mbu_wall")
        assert [pool[name] for name in names] == [None] * 4
        assert pool["busy_share"] > 0
