"""Times whole steps of served shapes with random weights, through the runner that workers use."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from baton.sampling_params import SamplingParams
from engine.checkpoint.model_config import ModelConfig
from engine.execution.runner import Ending
from engine.gpu.decoder import GpuStepModel
from engine.gpu.draws import GREEDY
from engine.gpu.fused_weights import gpu_weights
from engine.gpu.runner import GpuRunner
from engine.kv.kv_cache import KvCache, block_bytes
from engine.quantization.weight import QuantKind
from engine.sampling.step import StepInput
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan, StepResult
from loadtest.gpu.common.cases import BLOCK, Step, config_of, small, step_cases
from loadtest.gpu.common.models import random_model
from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Fact, Item, Result, Timing
from loadtest.gpu.common.shapes import with_layers

_WARM_STEPS, _STEPS, _TRACED = 4, 32, 8
_PREFILLS = 5
_FREE_PART = 0.8
"""Share of the GPU memory for KV and captured steps. It is a share of the memory that the weights
leave free."""


@dataclass(frozen=True, slots=True)
class _Key:
    """Properties of a timed step that determine its runner. Cases with equal keys share a
    runner."""

    model: str
    weights: QuantKind | None
    deterministic: bool


class _Benches:
    """Holds the runner of the last timed case. There is only one runner at a time, since its
    weights fill the GPU."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._key: _Key | None = None
        self._bench: _Bench | None = None
        self._seconds: dict[Step, float | None] = {}

    def seconds(self, case: Step) -> float | None:
        """Return the time of a case's step; None if the GPU's memory cannot hold its KV.

        Results are cached, since different cases may have the same step.
        """
        alike = replace(case, name="")
        if alike not in self._seconds:
            bench = self.of(case)
            measure = bench.decode if case.decodes else bench.chunk
            self._seconds[alike] = measure(case) if bench.holds(case) else None
        return self._seconds[alike]

    def of(self, case: Step) -> _Bench:
        """Return the runner for a case. If the previous runner has another key, free it first."""
        key = _Key(case.model, case.weights, case.deterministic)
        if self._bench is None or key != self._key:
            self._bench = None
            _free(self._place)
            self._key, self._bench = key, _Bench(self._place, case)
        return self._bench


def step_speed_items(place: Place) -> Iterator[Item]:
    """Yield an item for each timed step, then a breakdown of one step's time."""
    if place.describes:
        for case in step_cases():
            # Quantized experts wait for the GPU within a step.
            if case.weights is None or case.config.experts is None:
                yield Item(case.name, partial(_describe, place, case))
        return
    benches = _Benches(place)
    for case in step_cases():
        sized = small(case) if place.small else case
        assert isinstance(sized, Step), "a small step is a step"
        yield Item(case.name, partial(_measure, benches, sized))
        if case.name == "decode 32 × 1k" and place.on_gpu:
            yield Item(f"{case.name}: kernels", partial(_trace, benches, sized))


def _measure(benches: _Benches, case: Step) -> Iterator[Result]:
    seconds = benches.seconds(case)
    if seconds is None:
        yield Fact(case.name, {"not run": "the GPU's memory does not hold its KV"})
    else:
        yield Timing(case.name, seconds)


def _trace(benches: _Benches, case: Step) -> Iterator[Result]:
    yield benches.of(case).trace(case)


def _describe(place: Place, case: Step) -> Iterator[Result]:
    """Launch the kernels of a step with a model of two layers, without computing anything."""
    config = with_layers(case.config, 2)
    blocks = sum(_width(at + count) for at, count in case.rows)
    cache = KvCache(config, blocks, BLOCK, place.dtype, place.device)
    weights = gpu_weights(
        random_model(config, place.device, place.dtype, case.weights),
        deterministic=case.deterministic,
    )
    model = GpuStepModel(weights, cache, _max_rows(place), capture=place.capture())
    tokens = [0] * case.tokens
    ends = [sum(count for _, count in case.rows[: n + 1]) - 1 for n in range(len(case.rows))]
    model.start(StepInput(_rows(case, 0), tokens, ends, True), [GREEDY] * len(ends))
    yield from ()


def _free(place: Place) -> None:
    """Free a model's GPU memory. The model is part of a reference cycle, since captured steps refer
    to it.
    """
    gc.collect()
    if place.on_gpu:
        torch.cuda.empty_cache()


def _max_rows(place: Place) -> int:
    return 8 if place.small else 256


def _width(tokens: int) -> int:
    """Return the number of blocks that a sequence needs to decode through all measured steps."""
    return -(-(tokens + _WARM_STEPS + _STEPS + _TRACED) // BLOCK)


def _rows(case: Step, step: int) -> tuple[PlanRow, ...]:
    """Return the rows of the step with this number. Decoding sequences have one more token in each
    step.
    """
    rows, first = [], 0
    for number, (at, count) in enumerate(case.rows):
        width = _width(at + count)
        table = tuple(range(first, first + width))
        first += width
        rows.append(PlanRow(number, at + (step if count == 1 else 0), count, table, True))
    return tuple(rows)


class _Bench:
    """A runner with a model of random weights. It runs step plans that this class makes, without a
    scheduler."""

    def __init__(self, place: Place, case: Step) -> None:
        self._place = place
        config = config_of(case, tiny=place.small)
        self._config = config
        model = random_model(config, place.device, place.dtype, case.weights)
        weights = gpu_weights(model, deterministic=case.deterministic)
        del model
        self._cache = KvCache(config, self._pool(config), BLOCK, place.dtype, place.device)
        steps = GpuStepModel(weights, self._cache, _max_rows(place), capture=place.capture())
        self._runner = GpuRunner(steps, self._cache, place.device)

    def _pool(self, config: ModelConfig) -> int:
        """Return the number of blocks in the KV pool: as many as the largest case needs, or as many
        as the GPU's memory allows.
        """
        if not self._place.on_gpu:
            return 64
        wanted = max(
            sum(_width(at + count) for at, count in case.rows)
            for case in step_cases()
            if case.config == config
        )
        free, _ = torch.cuda.mem_get_info(self._place.device)
        return min(wanted, int(free * _FREE_PART) // block_bytes(config, BLOCK, self._place.dtype))

    def holds(self, case: Step) -> bool:
        """Return whether the pool has enough blocks for the sequences of a case."""
        return sum(_width(at + count) for at, count in case.rows) <= self._cache.blocks

    def decode(self, case: Step) -> float:
        """Run overlapping decode steps. Return the median time between their ends, in seconds."""
        ends: list[float] = []

        def note(_: StepResult) -> None:
            ends.append(time.perf_counter())

        steps = 1 if self._place.small else _STEPS
        if case.weights is not None and case.config.experts is not None:
            # Each step takes a second.
            steps = 2
        warm = 1 if self._place.small else _WARM_STEPS
        self._run(case, warm + steps, note)
        gaps = [after - before for before, after in pairwise(ends)]
        return statistics.median(gaps[warm - 1 :])

    def chunk(self, case: Step) -> float:
        """Run a case's step several times without overlap. Return the median time, in seconds."""
        taken = []
        for _ in range(1 if self._place.small else 1 + _PREFILLS):
            began = time.perf_counter()
            self._runner.run(StepPlan(0, self._new(case), (), _rows(case, 0)))
            taken.append(time.perf_counter() - began)
            self._forget(case)
        return statistics.median(taken[1:] or taken)

    def trace(self, case: Step) -> Fact:
        """Run a case's steps under a profiler. Return the share of time without a running kernel,
        and the slowest kernels.
        """
        found: list[float] = []
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self._run(case, _TRACED, lambda result: found.append(result.seconds))
        events = [e for e in trace.key_averages() if e.device_type == DeviceType.CUDA]
        kernels = [e for e in events if not e.key.startswith("Mem")]
        kernels.sort(key=lambda event: -event.self_device_time_total)
        busy_s = sum(event.self_device_time_total for event in kernels) / 1e6 / _TRACED
        wall_s = statistics.median(found[1:])
        return Fact(
            f"{case.name}: kernels",
            {
                "wall_s": wall_s,
                "kernel_s": busy_s,
                "outside": 1.0 - busy_s / wall_s,
                "top": {e.key[:60]: e.self_device_time_total / 1e6 / _TRACED for e in kernels[:8]},
            },
        )

    def _run(self, case: Step, steps: int, note: Callable[[StepResult], None]) -> None:
        endings: list[Ending] = []
        new = self._new(case)
        for step in range(steps):
            plan = StepPlan(step, () if step else new, (), _rows(case, step))
            endings.append(self._runner.start(plan))
            if len(endings) > 1:
                note(endings.pop(0)())
        for ending in endings:
            note(ending())
        self._forget(case)

    def _forget(self, case: Step) -> None:
        for number in range(len(case.rows)):
            self._runner.forget(number)

    def _new(self, case: Step) -> tuple[NewSequence, ...]:
        """Return sequences whose KV is never computed: its values do not change the speed."""
        return tuple(
            NewSequence(
                number,
                tuple((7 * n) % self._config.vocab_size for n in range(at + count)),
                at + count,
                _sampling(case, number),
                (),
            )
            for number, (at, count) in enumerate(case.rows)
        )


def _sampling(case: Step, number: int) -> SamplingParams:
    if number < case.penalized:
        return SamplingParams(temperature=0.0, repetition_penalty=1.05, ignore_eos=True)
    if case.top_p < 1.0:
        return SamplingParams(temperature=1.0, top_p=case.top_p, seed=number, ignore_eos=True)
    return SamplingParams(temperature=0.0, ignore_eos=True)
