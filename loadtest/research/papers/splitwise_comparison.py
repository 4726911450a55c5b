"""Splitwise's clusters of equal cost and of equal power, with our simulator.

Patel et al., Splitwise: Efficient Generative LLM Inference Using Phase Splitting, ISCA 2024,
section VI; how many machines of which kind there are is in its authors' scripts (SplitwiseSim,
scripts/run_throughput_isocost.sh and run_throughput_isopower.sh). Requests come at random times
with lengths drawn from Azure's conversations of 2023, as theirs do (generate_trace.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadtest.research.papers.paper_tools import SEED, Finding, best_rate, quiet_config
from loadtest.research.papers.splitwise_costs import SplitwiseCosts
from planning.common.traces import Trace, TracedRequest
from planning.simulator.cluster.step_log import Floats
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.model_shape import MODELS
from planning.simulator.costs.step_model import StepCostModel, StepLoad
from planning.simulator.costs.worker_profile import WorkerProfile, gpu_profile
from planning.simulator.results import SimulationResult
from planning.simulator.simulation import simulate

_SECONDS = 30.0
"""Of arrivals at each rate."""
_BATCH_TOKENS = 2048
_BATCH_SEQUENCES = 512
_MAX_PER_A100 = 4.0
"""Requests/s that a machine is taken to serve at most."""
_OBJECTIVES = {
    "TTFT": {50: 2.0, 90: 3.0, 99: 6.0},
    "TPOT": {50: 1.25, 90: 1.5, 99: 5.0},
    "E2EL": {50: 1.25, 90: 1.5, 99: 5.0},
}
"""The paper's nine, as its authors' notebooks/plots.ipynb has them: at a percentile of the
requests, how many times longer each may take than alone on an A100 machine."""


@dataclass(frozen=True, slots=True)
class Machines:
    """A cluster. Machines of eight GPUs; with ``prefill`` 0 each does both."""

    name: str
    prefill: int
    decode: int
    prefill_gpu: str
    decode_gpu: str


EQUAL_COST = (
    Machines("baseline H100", 0, 20, "h100", "h100"),
    Machines("baseline A100", 0, 43, "a100", "a100"),
    Machines("Splitwise-AA", 25, 18, "a100", "a100"),
    Machines("Splitwise-HH", 12, 8, "h100", "h100"),
    Machines("Splitwise-HA", 15, 10, "h100", "a100"),
)
"""Half of the authors' machines (40; 86; 51+35; 25+15; 30+21), so that a search takes a minute."""
EQUAL_POWER = (
    Machines("baseline A100", 0, 35, "a100", "a100"),
    Machines("Splitwise-AA", 23, 12, "a100", "a100"),
)
"""Likewise (70; 45+25)."""
Kinds = Callable[[str], StepCostModel | None]
"""The costs of a machine by its GPU; None: those of the data sheet."""
KINDS: dict[str, Kinds] = {
    "sheets": lambda gpu: None,
    "measured": SplitwiseCosts,
    "flat": lambda gpu: SplitwiseCosts(gpu, flat=True),
}


def machine(gpu: str, kinds: Kinds) -> WorkerProfile:
    """Llama-2-70B on eight GPUs, in the paper's limits."""
    sheet = gpu_profile(gpu, MODELS["llama-2-70b"], tensor_parallel=8)
    return replace(
        sheet,
        costs=kinds(gpu) or sheet.costs,
        context_length=1 << 20,
        chunk_tokens=_BATCH_TOKENS,
        max_sequences=_BATCH_SEQUENCES,
    )


def conversations(trace: Trace, rate: float) -> list[TracedRequest]:
    """Poisson arrivals; prompts and answers drawn apart from one another."""
    generator = np.random.default_rng(SEED)
    count = max(1, round(rate * _SECONDS))
    times = np.cumsum(generator.exponential(1.0 / rate, count))
    places = generator.integers(len(trace.requests), size=(count, 2))
    return [
        TracedRequest(
            at_s, trace.requests[prompt].input_tokens, trace.requests[answer].output_tokens
        )
        for at_s, (prompt, answer) in zip(times.tolist(), places.tolist(), strict=True)
    ]


def slowdowns(result: SimulationResult, lone: StepCostModel) -> dict[str, Floats]:
    """Of each request, how many times longer than alone. Infinite where it did not end well."""
    found: dict[str, list[float]] = {name: [] for name in _OBJECTIVES}
    for request in result.requests:
        prompt, answer = request.input_tokens, request.output_tokens
        ttft_s = lone.seconds(StepLoad(0, 0, ((prompt, 0),)))
        tpot_s = lone.seconds(StepLoad(1, prompt + answer // 2))
        e2el_s = ttft_s + (answer - 1) * tpot_s
        if not request.ok:
            ratios = [np.inf] * 3
        else:
            own = request.tpot_s if answer > 1 else 0.0
            ratios = [request.ttft_s / ttft_s, own / tpot_s, request.e2el_s / e2el_s]
        for name, ratio in zip(found, ratios, strict=True):
            found[name].append(ratio)
    return {name: np.array(ratios) for name, ratios in found.items()}


def missed(result: SimulationResult, lone: StepCostModel) -> list[str]:
    """The objectives that are not met, such as "TTFT p90"."""
    return [
        f"{name} p{percentile}"
        for name, ratios in slowdowns(result, lone).items()
        for percentile, most in _OBJECTIVES[name].items()
        if np.percentile(ratios, percentile) > most
    ]


def throughput(machines: Machines, trace: Trace, kinds: Kinds) -> tuple[float, list[str]]:
    """The highest rate in requests/s that meets all objectives, and what a higher one misses."""
    prefill, decode = (machine(gpu, kinds) for gpu in (machines.prefill_gpu, machines.decode_gpu))
    lone = machine("a100", kinds).costs
    shape = ClusterShape(machines.prefill, machines.decode, prefill, decode, paces_chunks=False)
    limit: list[str] = []

    def serve(requests: Sequence[TracedRequest]) -> SimulationResult:
        return simulate(requests, shape, quiet_config(), seed=SEED)

    def good(result: SimulationResult) -> bool:
        found = missed(result, lone)
        if found:
            limit[:] = found
        return not found

    worth = sum(
        count * (2.15 if gpu == "h100" else 1.0)
        for count, gpu in (
            (machines.prefill, machines.prefill_gpu),
            (machines.decode, machines.decode_gpu),
        )
    )
    rate = best_rate(lambda rate: conversations(trace, rate), serve, good, _MAX_PER_A100 * worth)
    return rate, limit


def equal_cost(trace: Trace, costs: str) -> list[Finding]:
    """Clusters of equal cost, with one of ``KINDS``."""
    return _findings(EQUAL_COST, trace, KINDS[costs], "1.4")


def equal_power(trace: Trace, costs: str) -> list[Finding]:
    """Clusters of equal power, with one of ``KINDS``."""
    return _findings(EQUAL_POWER, trace, KINDS[costs], "2.15")


def _findings(
    clusters: Sequence[Machines], trace: Trace, kinds: Kinds, published: str
) -> list[Finding]:
    """The first cluster is what the others are compared with; ``published`` is Splitwise-AA's."""
    found: list[Finding] = []
    base = 0.0
    for machines in clusters:
        rate, limit = throughput(machines, trace, kinds)
        base = base or rate
        shown = f"{rate:.0f}/s, {rate / max(base, 1e-9):.2f} times (then {', '.join(limit)})"
        theirs = published if machines.name == "Splitwise-AA" else ""
        found.append(Finding(_named(machines), theirs, shown))
    return found


def _named(machines: Machines) -> str:
    count = f"{machines.prefill}+{machines.decode}" if machines.prefill else f"{machines.decode}"
    return f"{machines.name}, {count} machines"
