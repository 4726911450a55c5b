"""Compares the simulator with published experiments, in their configurations.

    python -m loadtest.research.papers.paper_comparison [distserve] [chatbot] [interference] …

docs/lab-notes/simulator.md describes the comparisons, and why figures differ. Sources:

- DistServe: Zhong et al., DistServe: Disaggregating Prefill and Decoding for Goodput-optimized
  Large Language Model Serving, OSDI 2024; its authors' article "Throughput is Not All You Need"
  (2024) has the experiment with 512 tokens in and 64 out on an A100.
- Splitwise: see ``loadtest.research.papers.splitwise``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from loadtest.research.papers.paper_tools import SEED, Finding, MeetsSlos, best_rate, quiet_config
from loadtest.research.papers.splitwise import KINDS, equal_cost, equal_power
from planning.common.report import print_whole, whole_table
from planning.common.traces import TracedRequest, read_trace
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.analytical_costs import DEFAULT_EFFICIENCY, Efficiency
from planning.simulator.costs.model_shape import MODELS
from planning.simulator.costs.step_model import StepLoad
from planning.simulator.costs.worker_profile import gpu_profile
from planning.simulator.results import SimulationResult
from planning.simulator.simulation import simulate

_REQUESTS = 400
_ATTAINMENT = 0.9

ENGINE_OF_2024 = Efficiency(products=0.34, attention=0.3, memory=0.6, launch_s=8e-3)
"""Efficiencies fitted to two of DistServe's figures: prefill alone, and decode alone. The simulator
predicts the other figures with these efficiencies."""


def poisson(rate: float, prompt: int, answer: int) -> list[TracedRequest]:
    """Return requests of one size that arrive at random times, ``rate`` per second. Another rate
    scales the same times.
    """
    gaps = np.random.default_rng(SEED).exponential(1.0, _REQUESTS)
    return [TracedRequest(float(at_s), prompt, answer) for at_s in np.cumsum(gaps) / rate]


def _within(ttft_s: float, tpot_s: float) -> MeetsSlos:
    def good(result: SimulationResult) -> bool:
        met = [
            request.ok
            and request.ttft_s <= ttft_s
            and not (request.output_tokens > 1 and request.tpot_s > tpot_s)
            for request in result.requests
        ]
        return float(np.mean(met)) >= _ATTAINMENT

    return good


def distserve(efficiency: Efficiency) -> list[Finding]:
    """Simulate DistServe's experiment: 13B on A100s, 512 tokens in, 64 out, P90 TTFT 0.4 s and P90
    TPOT 0.04 s.
    """
    worker = gpu_profile("a100", MODELS["opt-13b"], efficiency, chunk_tokens=2048)
    nvlink = replace(worker, wire_bytes_per_s=240e9)
    prompt, answer = 512, 64

    def rate(shape: ClusterShape, answer: int, ttft_s: float, tpot_s: float) -> float:
        return best_rate(
            lambda rate: poisson(rate, prompt, answer),
            lambda requests: simulate(requests, shape, quiet_config(), seed=SEED),
            _within(ttft_s, tpot_s),
            30.0,
        )

    together = ClusterShape(0, 1, worker, worker, paces_chunks=False)
    one_pair = ClusterShape(1, 1, nvlink, nvlink)
    apart = ClusterShape(2, 1, nvlink, nvlink)
    many = ClusterShape(16, 1, nvlink, nvlink)
    colocated = rate(together, answer, 0.4, 0.04)
    prefill = rate(one_pair, 1, 0.4, 0.04)
    decode = rate(many, answer, 0.4, 0.04)
    disaggregated = rate(apart, answer, 0.4, 0.04) / 3
    ratio = disaggregated / max(colocated, 1e-9)
    return [
        Finding("colocated, requests/s/GPU", "1.6", f"{colocated:.1f}"),
        Finding("one prefill worker alone, requests/s", "5.6", f"{prefill:.1f}"),
        Finding("one decode worker alone, requests/s", "10", f"{decode:.1f}"),
        Finding("2 prefill + 1 decode, requests/s/GPU", "3.3", f"{disaggregated:.1f}"),
        Finding("gain of disaggregation", "2.1", f"{ratio:.1f}"),
    ]


def chatbot(efficiency: Efficiency) -> list[Finding]:
    """Simulate DistServe's chatbot for OPT-13B with its SLOs (section 6.1). Lengths are like those
    of conversations."""
    worker = gpu_profile("a100", MODELS["opt-13b"], efficiency, chunk_tokens=2048)
    nvlink = replace(worker, wire_bytes_per_s=240e9)

    def traffic(rate: float) -> list[TracedRequest]:
        generator = np.random.default_rng(SEED)
        prompts = np.clip(generator.lognormal(np.log(500), 0.9, _REQUESTS), 8, 1500).astype(int)
        answers = np.clip(generator.lognormal(np.log(150), 0.8, _REQUESTS), 2, 500).astype(int)
        times = np.cumsum(generator.exponential(1.0, _REQUESTS)) / rate
        rows = zip(times.tolist(), prompts.tolist(), answers.tolist(), strict=True)
        return [TracedRequest(*row) for row in rows]

    def rate(shape: ClusterShape) -> float:
        def serve(requests: Sequence[TracedRequest]) -> SimulationResult:
            return simulate(requests, shape, quiet_config(), seed=SEED)

        found = best_rate(traffic, serve, _within(0.25, 0.1), 12.0 * shape.gpus)
        return found / shape.gpus

    colocated = rate(ClusterShape(0, 1, worker, worker, paces_chunks=False))
    shapes = [ClusterShape(p, d, nvlink, nvlink) for p, d in ((1, 1), (2, 1))]
    best = max(rate(shape) for shape in shapes)
    return [
        Finding("chatbot, TTFT 0.25 s, TPOT 0.1 s: gain", "2.0-4.6", f"{best / colocated:.1f}"),
    ]


def interference() -> list[Finding]:
    """Simulate how one prompt slows a decode step: 13B on an A100, 32 sequences of 512 tokens."""
    costs = gpu_profile("a100", MODELS["opt-13b"]).costs
    alone_s = costs.seconds(StepLoad(32, 32 * 512))
    findings = [Finding("step of 32 decoding sequences, ms", "", f"{alone_s * 1e3:.1f}")]
    for prompt in (128, 512, 1024, 2048):
        beside_s = costs.seconds(StepLoad(32, 32 * 512, ((prompt, 0),)))
        shown = f"{beside_s * 1e3:.1f} ({beside_s / alone_s:.1f}x)"
        findings.append(Finding(f"the same with a prompt of {prompt}, ms", "", shown))
    return findings


def main(asked: Sequence[str]) -> None:
    """Print the requested tables, or by default those that need no trace."""
    console = Console()
    every: dict[str, Callable[[], list[Finding]]] = {
        "distserve": lambda: distserve(ENGINE_OF_2024),
        "distserve-today": lambda: distserve(DEFAULT_EFFICIENCY),
        "chatbot": lambda: chatbot(DEFAULT_EFFICIENCY),
        "interference": interference,
    }
    traces = [Path(name) for name in asked if Path(name).is_file()]
    if traces:
        trace = read_trace(traces[0])
        for costs in KINDS:
            every[f"splitwise-{costs}"] = partial(equal_cost, trace, costs)
            every[f"splitwise-power-{costs}"] = partial(equal_power, trace, costs)
    for name, findings in every.items():
        if name in asked or not [one for one in asked if one in every]:
            table = whole_table(name, "published", "simulated", title="")
            for finding in findings():
                table.add_row(finding.name, finding.published, finding.simulated)
            print_whole(console, table)


if __name__ == "__main__":
    main(sys.argv[1:])
