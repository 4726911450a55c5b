"""Speeds of the GPU's kernels, and of whole steps of an 8B Llama, against the device's ceilings."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from torch.profiler import ProfilerActivity, profile

from baton.sampling_params import SamplingParams
from engine.ceilings import elapsed
from engine.gpu.activation import gated
from engine.gpu.attention_reference import Scoring
from engine.gpu.chunk_attention import chunk_attention
from engine.gpu.decode_attention import decode_attention
from engine.gpu.decoder import GpuStepModel
from engine.gpu.fixed_linear import fixed_linear
from engine.gpu.fused_weights import gpu_weights
from engine.gpu.graphs import CudaCapture
from engine.gpu.kv_blocks import KvBlocks
from engine.gpu.norm import add_norm
from engine.gpu.quantized_linear import GpuWeight, gpu_weight, quantized_linear
from engine.gpu.runner import GpuRunner
from engine.kv_cache import KvCache, block_bytes
from engine.model_config import ModelConfig
from engine.plan import NewSequence, PlanRow, StepPlan, StepResult
from engine.quantization.weight import KINDS, QuantKind
from engine.roofline import Ceilings, Roof, Storage, step_work
from engine.runner import Ending
from loadtest.random_model import llama_8b, random_model, tiny_llama

Of = Literal["bandwidth", "products", "step", "time", "tokens"]

_REPEATS, _TOGETHER = 7, 8
_BLOCK = 16
_GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
_WARM_STEPS, _STEPS, _TRACED = 4, 32, 4
_PREFILLS = 5
_WEIGHT_BYTES: dict[QuantKind | None, float] = {None: 2.0, "int8": 1.125, "int4": 0.75, "fp8": 1.0}
"""Of one weight as the GPU holds it, with fp32 scales and minimums in groups of 32."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A speed as a share of what it is measured against."""

    name: str
    seconds: float
    share: float
    of: Of
    """Measured copy bandwidth, measured rate of products, the step's wall time, other steps' time,
    or tokens a second without drafts."""
    target: float | None = None
    at_most: bool = False
    """Whether the target is an upper bound."""

    @property
    def met(self) -> bool | None:
        """None where there is no target."""
        if self.target is None:
            return None
        return self.share <= self.target if self.at_most else self.share >= self.target


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is measured: on a GPU the full sizes; small ones try the script itself."""

    batch: int
    context: int
    long: int
    prompt: int
    hidden: int
    inner: int
    vocab: int
    heads: int
    kv_heads: int
    dim: int
    layers: int


FULL = Sizes(64, 4096, 32768, 8192, 4096, 14336, 128256, 32, 8, 128, 8)
SMALL = Sizes(2, 40, 60, 48, 64, 96, 100, 4, 2, 32, 1)


def _median(device: torch.device, works: Sequence[Callable[[], object]]) -> float:
    """Median seconds of one of ``works``, which run after one another.

    On a GPU they are captured, so that it never waits for a launch.
    """
    on_gpu = device.type == "cuda"
    repeats = -(-_TOGETHER // len(works)) if on_gpu else 1

    def all_works() -> None:
        for _ in range(repeats):
            for work in works:
                work()

    run = CudaCapture(device)(all_works) if on_gpu else all_works
    run()
    median = statistics.median(elapsed(device, run) for _ in range(_REPEATS if on_gpu else 1))
    return median / repeats / len(works)


@torch.inference_mode()
def measure_kernels(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, ceilings: Ceilings
) -> Iterator[Figure]:
    """The kernels that take most of a step's time."""
    bench = _KernelBench(device, dtype, sizes, ceilings)
    yield bench.decode(sizes.batch, sizes.context, dtype, 0.85)
    yield bench.decode(1, sizes.long, dtype)
    yield bench.decode(sizes.batch, sizes.context, torch.float8_e4m3fn)
    yield bench.chunk(sizes.prompt)
    yield bench.norm()
    yield bench.gate()
    for rows in (1, 16):
        yield bench.plain_linear(rows, fixed=False)
        yield bench.plain_linear(rows, fixed=True)
    yield bench.product(sizes.prompt, fixed=False)
    yield bench.product(sizes.prompt, fixed=True)
    for kind in KINDS:
        for rows in (1, 16):
            yield bench.quantized(kind, rows)


class _KernelBench:
    def __init__(
        self, device: torch.device, dtype: torch.dtype, sizes: Sizes, ceilings: Ceilings
    ) -> None:
        self._device = device
        self._dtype = dtype
        self._sizes = sizes
        self._ceilings = ceilings

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=self._dtype, device=self._device)

    def _by_bytes(
        self, name: str, works: Sequence[Callable[[], object]], count: float, target: float | None
    ) -> Figure:
        seconds = _median(self._device, works)
        share = count / seconds / self._ceilings.bytes_per_s
        return Figure(name, seconds, share, "bandwidth", target)

    def _by_operations(self, name: str, work: Callable[[], object], count: float) -> Figure:
        seconds = _median(self._device, [work])
        return Figure(name, seconds, count / seconds / self._ceilings.operations_per_s, "products")

    def _blocks(
        self, sequences: int, tokens: int, kv: torch.dtype
    ) -> tuple[KvBlocks, torch.Tensor]:
        """Blocks of several layers, and tables that have them in any order."""
        sizes = self._sizes
        width = -(-tokens // _BLOCK)
        count = sequences * width
        shape = (count, sizes.layers, 2, sizes.kv_heads, _BLOCK, sizes.dim)
        order = torch.randperm(count, device=self._device).int().view(sequences, width)
        if kv == self._dtype:
            data = torch.empty(shape, dtype=kv, device=self._device).normal_()
            return KvBlocks(data), order
        bits = torch.randint(0, 120, shape, dtype=torch.uint8, device=self._device)
        return KvBlocks(bits.view(kv), torch.full(shape[:-1], 0.01, device=self._device)), order

    def decode(
        self, batch: int, context: int, kv: torch.dtype, target: float | None = None
    ) -> Figure:
        """One layer after another, so that none finds its keys in a cache of the GPU."""
        sizes = self._sizes
        blocks, tables = self._blocks(batch, context, kv)
        queries = self._randn(batch, sizes.heads, sizes.dim)
        lengths = torch.full((batch,), context, dtype=torch.int32, device=self._device)
        scoring = Scoring(sizes.dim**-0.5)

        def attend(layer: int) -> Callable[[], object]:
            return lambda: decode_attention(queries, blocks, layer, tables, lengths, scoring)

        per_token = (
            2 * sizes.kv_heads * (sizes.dim * kv.itemsize + (4 if blocks.scales is not None else 0))
        )
        return self._by_bytes(
            f"decode attention, {kv}, batch {batch} × {context}".replace("torch.", ""),
            [attend(layer) for layer in range(sizes.layers)],
            batch * context * per_token,
            target,
        )

    def chunk(self, tokens: int) -> Figure:
        sizes = self._sizes
        blocks, tables = self._blocks(1, tokens, self._dtype)
        queries = self._randn(tokens, sizes.heads, sizes.dim)
        starts = torch.tensor([0, tokens], dtype=torch.int32, device=self._device)
        contexts = torch.zeros(1, dtype=torch.int32, device=self._device)
        scoring = Scoring(sizes.dim**-0.5)
        return self._by_operations(
            f"attention of a chunk of {tokens}",
            lambda: chunk_attention(
                queries, blocks, 0, tables, starts, contexts, scoring, longest=tokens
            ),
            4.0 * sizes.heads * sizes.dim * tokens * (tokens + 1) / 2,
        )

    def norm(self) -> Figure:
        rows, hidden = self._sizes.prompt, self._sizes.hidden
        residual = torch.randn(rows, hidden, device=self._device)
        added, weight = self._randn(rows, hidden), torch.ones(hidden, device=self._device)
        return self._by_bytes(
            f"add and norm, {rows} rows",
            [lambda: add_norm(residual, added, weight, 1e-5, self._dtype)],
            rows * hidden * (8 + 2 * self._dtype.itemsize),
            None,
        )

    def gate(self) -> Figure:
        rows, inner = self._sizes.prompt, self._sizes.inner
        gate, up = self._randn(rows, 2 * inner).chunk(2, dim=1)
        return self._by_bytes(
            f"silu and product, {rows} rows",
            [lambda: gated(gate, up, "silu")],
            3 * rows * inner * self._dtype.itemsize,
            None,
        )

    def plain_linear(self, rows: int, *, fixed: bool) -> Figure:
        """The bytes of the weights count."""
        x, weight = self._weight(rows)
        multiply = fixed_linear if fixed else F.linear
        name = "linear of fixed order" if fixed else "cuBLAS linear"
        return self._by_bytes(
            f"{name}, {rows} rows", [lambda: multiply(x, weight)], weight.nbytes, None
        )

    def product(self, rows: int, *, fixed: bool) -> Figure:
        x, weight = self._weight(rows)
        multiply = fixed_linear if fixed else F.linear
        name = "linear of fixed order" if fixed else "cuBLAS linear"
        return self._by_operations(
            f"{name}, {rows} rows", lambda: multiply(x, weight), 2.0 * rows * weight.numel()
        )

    def _weight(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self._sizes.hidden
        return self._randn(rows, hidden), self._randn(2 * self._sizes.inner, hidden)

    def quantized(self, kind: QuantKind, rows: int) -> Figure:
        weight = self._codes(kind)
        x = self._randn(rows, self._sizes.hidden)
        parts = (weight.codes, weight.scales, weight.mins)
        return self._by_bytes(
            f"{kind} linear, {rows} rows",
            [lambda: quantized_linear(x, weight)],
            sum(part.nbytes for part in parts if part is not None),
            None,
        )

    def _codes(self, kind: QuantKind) -> GpuWeight:
        """Of more bytes than the GPU's caches hold."""
        outputs, inputs = 8 * self._sizes.inner, self._sizes.hidden
        width = inputs // 2 if kind == "int4" else inputs
        codes = torch.randint(0, 112, (outputs, width), dtype=torch.uint8, device=self._device)
        groups = 1 if kind == "fp8" else inputs // 32
        scales = torch.full((outputs, groups), 0.01, device=self._device)
        return gpu_weight(kind, codes, scales, scales if kind == "int4" else None)


@torch.inference_mode()
def measure_steps(
    device: torch.device, dtype: torch.dtype, sizes: Sizes, ceilings: Ceilings
) -> Iterator[Figure]:
    """Whole steps: those with a target first, in case that time runs out."""
    config = llama_8b(2 * sizes.prompt) if sizes is FULL else tiny_llama()
    # Within one size of captured steps from the first step to the last.
    long, context = sizes.context * 15 // 16, sizes.context * 15 // 64
    bench = _StepBench(device, dtype, config, ceilings)
    yield bench.decode(1, context, target=0.8)
    yield bench.prefill(sizes.prompt, target=0.6)
    middle = bench.decode(min(32, sizes.batch), context)
    yield middle
    if device.type == "cuda":
        yield bench.overhead(min(32, sizes.batch), context)
    if bench.holds(sizes.batch, long):
        yield bench.decode(sizes.batch, long)
    del bench
    _free(device)
    fixed = _StepBench(device, dtype, config, ceilings, deterministic=True)
    other = fixed.decode(min(32, sizes.batch), context)
    yield other
    yield Figure(
        f"{other.name}, over the usual",
        other.seconds,
        other.seconds / middle.seconds,
        "time",
        1.2,
        at_most=True,
    )
    yield fixed.prefill(sizes.prompt)
    del fixed
    for kind in KINDS:
        _free(device)
        yield from _quantized_steps(device, dtype, config, ceilings, kind, context)


def _free(device: torch.device) -> None:
    """Give back a model's memory. It is part of a cycle: steps that were captured know it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _quantized_steps(
    device: torch.device,
    dtype: torch.dtype,
    config: ModelConfig,
    ceilings: Ceilings,
    kind: QuantKind,
    context: int,
) -> Iterator[Figure]:
    bench = _StepBench(device, dtype, config, ceilings, kind)
    yield bench.decode(1, context)
    yield bench.decode(2, context)


class _StepBench:
    """An engine's runner over a model of random weights, fed with plans made by hand."""

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        config: ModelConfig,
        ceilings: Ceilings,
        kind: QuantKind | None = None,
        *,
        deterministic: bool = False,
    ) -> None:
        self._device = device
        self._config = config
        self._ceilings = ceilings
        self._kind = f"{kind} weights, " if kind else "fixed order, " if deterministic else ""
        model = random_model(config, device, dtype, kind)
        self._cache = KvCache(config, self._pool(dtype), _BLOCK, dtype, device)
        self._storage = Storage(
            _WEIGHT_BYTES[kind] * dtype.itemsize / 2 if kind is None else _WEIGHT_BYTES[kind],
            dtype.itemsize,
            self._cache.block_bytes / _BLOCK,
        )
        capture = CudaCapture(device) if device.type == "cuda" else None
        weights = gpu_weights(model, deterministic=deterministic)
        steps = GpuStepModel(weights, self._cache, 64, capture=capture)
        self._runner = GpuRunner(steps, self._cache, device)

    def _pool(self, dtype: torch.dtype) -> int:
        """Blocks: for the largest batch, or for half of what is free."""
        if self._device.type != "cuda":
            return 64
        free, _ = torch.cuda.mem_get_info(self._device)
        wanted = 64 * (-(-(FULL.context + 64) // _BLOCK))
        return min(wanted, int(free * 0.5) // block_bytes(self._config, _BLOCK, dtype))

    def holds(self, batch: int, context: int) -> bool:
        return batch * self._width(context) <= self._cache.blocks

    def _width(self, tokens: int) -> int:
        return -(-(tokens + _WARM_STEPS + _STEPS + _TRACED) // _BLOCK)

    def decode(self, batch: int, context: int, target: float | None = None) -> Figure:
        """Overlapping steps: each is started while the one before runs. Against its floor."""
        steps = _STEPS if self._device.type == "cuda" else 2
        ends: list[float] = []

        def note(_: StepResult) -> None:
            ends.append(time.perf_counter())

        self._run(batch, context, _WARM_STEPS + steps, note)
        gaps = [after - before for before, after in pairwise(ends)]
        seconds = statistics.median(gaps[_WARM_STEPS - 1 :])
        roof = self._roof(self._rows(batch, context, _WARM_STEPS + steps // 2), seconds)
        name = f"{self._kind}decode step, batch {batch} × {context}"
        if roof.bound == "memory":
            return Figure(name, seconds, roof.mbu, "bandwidth", target)
        return Figure(name, seconds, roof.mfu, "products", target)

    def prefill(self, tokens: int, target: float | None = None) -> Figure:
        """A whole prompt in one step."""
        row = PlanRow(0, 0, tokens, tuple(range(-(-tokens // _BLOCK))), True)
        taken = []
        for _ in range(1 + (_PREFILLS if self._device.type == "cuda" else 1)):
            began = time.perf_counter()
            self._runner.run(StepPlan(0, self._new(1, tokens), (), (row,)))
            taken.append(time.perf_counter() - began)
            self._runner.forget(0)
        roof = self._roof((row,), statistics.median(taken[1:]))
        name = f"{self._kind}prefill of {tokens}"
        return Figure(name, roof.seconds, roof.mfu, "products", target)

    def overhead(self, batch: int, context: int) -> Figure:
        """The part of steps' wall time in which no kernel runs."""
        steps = _WARM_STEPS + _TRACED
        found: list[float] = []
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            self._run(batch, context, steps, lambda result: found.append(result.seconds))
        kernels = sum(
            event.self_device_time_total
            for event in trace.key_averages()
            if not event.key.startswith("Mem")
        )
        # The profiler sees all steps; of their walls the median stands for each.
        wall = statistics.median(found[_WARM_STEPS:])
        share = 1.0 - kernels / 1e6 / steps / wall
        return Figure(
            f"decode step, batch {batch} × {context}: outside kernels",
            wall,
            share,
            "step",
            0.05,
            at_most=True,
        )

    def _roof(self, rows: Sequence[PlanRow], seconds: float) -> Roof:
        return Roof(step_work(self._config, self._storage, rows), self._ceilings, seconds)

    def _run(
        self, batch: int, context: int, steps: int, note: Callable[[StepResult], None]
    ) -> None:
        endings: list[Ending] = []
        new = self._new(batch, context + 1)
        for step in range(steps):
            plan = StepPlan(step, () if step else new, (), self._rows(batch, context, step))
            endings.append(self._runner.start(plan))
            if len(endings) > 1:
                note(endings.pop(0)())
        for ending in endings:
            note(ending())
        for number in range(batch):
            self._runner.forget(number)

    def _new(self, batch: int, tokens: int) -> tuple[NewSequence, ...]:
        """Sequences whose KV is what the cache holds: its values change no speed."""
        ids = tuple((7 * n) % self._config.vocab_size for n in range(tokens))
        return tuple(NewSequence(n, ids, tokens, _GREEDY, ()) for n in range(batch))

    def _rows(self, batch: int, context: int, step: int) -> tuple[PlanRow, ...]:
        width = self._width(context)
        return tuple(
            PlanRow(n, context + step, 1, tuple(range(n * width, (n + 1) * width)), True)
            for n in range(batch)
        )
