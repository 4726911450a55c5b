"""Simulates Splitwise's clusters of equal cost and of equal power."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from loadtest.research.papers.paper_tools import SEED, Finding, best_rate, quiet_config
from planning.common.traces import Trace, TracedRequest
from planning.simulator.cluster.step_log import Floats
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.model_shape import MODELS
from planning.simulator.costs.step_model import DecodeLine, StepCostModel, StepLoad
from planning.simulator.costs.worker_profile import WorkerProfile, gpu_profile
from planning.simulator.results import SimulationResult
from planning.simulator.simulation import simulate
from worker.costs.step_costs import StepCosts, fit

_MIXED = 1.1
"""Time of a step with prompts and decoding sequences, divided by the time of a step with prompts
alone and as many tokens. The value is from the authors' simulator (performance_model.py)."""
_CONTEXT = 512
"""Number of context tokens of each sequence in the paper's decode measurements."""


@dataclass(frozen=True, slots=True)
class MachineTimes:
    """Measured median times of one machine, in milliseconds."""

    prompt: Mapping[int, float]
    """Time of a step with one prompt, by the prompt's number of tokens."""
    decode: Mapping[int, float]
    """Time of a decode step, by the number of sequences in the step. Each sequence has 512
    tokens."""


TIMES: Mapping[str, MachineTimes] = {
    "a100": MachineTimes(
        {128: 65.3, 256: 66.8, 512: 93.0, 1024: 154.5, 2048: 274.3, 4096: 661.2, 8192: 1550.0},
        {1: 45.0, 4: 45.8, 8: 46.5, 16: 50.4, 32: 53.0, 64: 71.6},
    ),
    "h100": MachineTimes(
        {128: 58.2, 256: 51.7, 512: 53.9, 1024: 77.9, 2048: 136.8, 4096: 390.3, 8192: 844.9},
        {1: 30.5, 4: 31.8, 8: 32.5, 16: 34.2, 32: 38.7, 64: 50.2},
    ),
}


class SplitwiseCosts:
    """Implements ``planning.simulator.costs.step_model.StepCostModel`` by linear interpolation."""

    def __init__(self, gpu: str, *, flat: bool = False) -> None:
        """``gpu`` is a100 or h100. With ``flat``, decode steps are looked up as in the authors'
        simulator.

        The authors' simulator looks up the time of a step by the number of tokens that it computes.
        The measured data have the number of context tokens instead. So a step with hundreds of
        sequences takes as long as a step with one.
        """
        times = TIMES[gpu]
        self._prompt = _columns(times.prompt)
        self._decode = _columns({1: times.decode[1]} if flat else times.decode)
        self._lines: dict[int, DecodeLine] = {}

    @property
    def peak(self) -> None:
        """Implement ``StepCostModel``."""

    def work(self, shape: StepLoad) -> None:
        """Return None: only the times of steps are known."""

    def seconds(self, shape: StepLoad) -> float:
        """Implement ``StepCostModel``."""
        if not shape.chunks:
            return self.decode_line(shape.decodes).base_s
        prompts_s = _between(self._prompt, shape.tokens) / 1e3
        return prompts_s * _MIXED if shape.decodes else prompts_s

    def decode_line(self, batch: int) -> DecodeLine:
        """Implement ``StepCostModel``. The cost of the sequences' context is included in the cost
        of the batch."""
        line = self._lines.get(batch)
        if line is None:
            line = self._lines[batch] = DecodeLine(_between(self._decode, batch) / 1e3, 0.0)
        return line

    def step_costs(self) -> StepCosts:
        """Implement ``StepCostModel``."""
        tokens, prompt_ms = self._prompt
        batches, decode_ms = self._decode
        return StepCosts(
            fit([(n, n * n / 2) for n in tokens.tolist()], prompt_ms.tolist()),
            fit([(batch, batch * _CONTEXT) for batch in batches.tolist()], decode_ms.tolist()),
        )


def _columns(times: Mapping[int, float]) -> tuple[Floats, Floats]:
    return np.array(list(times), dtype=np.float64), np.array(list(times.values()), dtype=np.float64)


def _between(columns: tuple[Floats, Floats], at: float) -> float:
    """Return the value at ``at`` by linear interpolation between two columns of points. Beyond the
    last point, extend the last segment."""
    x, y = columns
    if at <= x[-1] or len(x) == 1:
        return float(np.interp(at, x, y))
    slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
    return float(y[-1] + slope * (at - x[-1]))


_SECONDS = 30.0
"""Duration of arrivals at each rate, in seconds."""
_BATCH_TOKENS = 2048
_BATCH_SEQUENCES = 512
_MAX_PER_A100 = 4.0
"""Assumed maximum rate per machine, in requests/s. It bounds the search for the highest rate."""
_OBJECTIVES = {
    "TTFT": {50: 2.0, 90: 3.0, 99: 6.0},
    "TPOT": {50: 1.25, 90: 1.5, 99: 5.0},
    "E2EL": {50: 1.25, 90: 1.5, 99: 5.0},
}
"""The paper's nine objectives, as in its authors' notebooks/plots.ipynb: for each metric and
percentile of the requests, the maximum slowdown, relative to a request alone on an A100 machine."""


@dataclass(frozen=True, slots=True)
class Machines:
    """A cluster of machines with eight GPUs each. If ``prefill`` is 0, each machine computes both
    prompts and answers.
    """

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
"""Clusters of equal cost. They have half of the authors' machines (40; 86; 51+35; 25+15; 30+21), so
that a search takes a minute."""
EQUAL_POWER = (
    Machines("baseline A100", 0, 35, "a100", "a100"),
    Machines("Splitwise-AA", 23, 12, "a100", "a100"),
)
"""Clusters of equal power. They have half of the authors' machines (70; 45+25)."""
Kinds = Callable[[str], StepCostModel | None]
"""Function that returns the cost model of a machine by its GPU. If the function returns None, costs
are computed from the GPU's data sheet."""
KINDS: dict[str, Kinds] = {
    "sheets": lambda gpu: None,
    "measured": SplitwiseCosts,
    "flat": lambda gpu: SplitwiseCosts(gpu, flat=True),
}


def machine(gpu: str, kinds: Kinds) -> WorkerProfile:
    """Return the profile of a machine: Llama-2-70B on eight GPUs, with the paper's limits."""
    sheet = gpu_profile(gpu, MODELS["llama-2-70b"], tensor_parallel=8)
    return replace(
        sheet,
        costs=kinds(gpu) or sheet.costs,
        context_length=1 << 20,
        chunk_tokens=_BATCH_TOKENS,
        max_sequences=_BATCH_SEQUENCES,
    )


def conversations(trace: Trace, rate: float) -> list[TracedRequest]:
    """Return requests with Poisson arrivals. Prompt and answer lengths are drawn independently from
    the trace.
    """
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
    """Return the slowdowns of all requests by metric, relative to a request that runs alone. A
    failed request has an infinite slowdown."""
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
    """Return the names of the latency objectives that ``result`` misses, such as "TTFT p90"."""
    return [
        f"{name} p{percentile}"
        for name, ratios in slowdowns(result, lone).items()
        for percentile, most in _OBJECTIVES[name].items()
        if np.percentile(ratios, percentile) > most
    ]


def throughput(machines: Machines, trace: Trace, kinds: Kinds) -> tuple[float, list[str]]:
    """Return the highest rate in requests/s that meets all objectives, and the objectives that a
    higher rate misses."""
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
    """Compare clusters of equal cost. ``costs`` is a name in ``KINDS``."""
    return _findings(EQUAL_COST, trace, KINDS[costs], "1.4")


def equal_power(trace: Trace, costs: str) -> list[Finding]:
    """Compare clusters of equal power. ``costs`` is a name in ``KINDS``."""
    return _findings(EQUAL_POWER, trace, KINDS[costs], "2.15")


def _findings(
    clusters: Sequence[Machines], trace: Trace, kinds: Kinds, published: str
) -> list[Finding]:
    """Compare the throughput of each other cluster with the throughput of the first cluster.
    ``published`` is the paper's figure for Splitwise-AA.
    """
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
