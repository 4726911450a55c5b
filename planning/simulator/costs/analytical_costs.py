"""Computes a step's cost from a data sheet and a model's sizes: a roofline, part by part.

See Williams et al., Roofline: An Insightful Visual Performance Model for Multicore Architectures,
2009. A step has matrix products, attention and the cost of its launch. Each part takes the time of
its arithmetic or of its bytes, whichever is longer, at the stated share of the peak:

    step = max(products/flops, weights/bandwidth) + max(pairs/flops, kv/bandwidth) + reduce + launch

So the time of a step in which all sequences decode is a line in the tokens that they attend to.
"""

from __future__ import annotations

from dataclasses import dataclass

from planning.simulator.costs.hardware import Accelerator
from planning.simulator.costs.model_shape import ModelShape
from planning.simulator.costs.step_model import DecodeLine, Peak, StepLoad, StepWork
from worker.costs.step_costs import StepCosts, fit

_CHUNKS = ((64, 0), (256, 0), (512, 512), (1024, 0), (2048, 0), (2048, 6144), (8192, 0))
_BATCHES = ((1, 128), (1, 2048), (8, 512), (16, 2048), (32, 256), (64, 1024), (128, 512))
"""Steps that a worker's calibration would time. An entry of ``_CHUNKS`` has the number of tokens of
a chunk, and the number before it. An entry of ``_BATCHES`` has the number of sequences, and the
context tokens of each."""
_REDUCE_LATENCY_S = 10e-6
"""Latency of one all-reduce within a machine, in seconds."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of the data sheet's peaks that a step reaches; docs/explanation/simulator.md has the
    sources.
    """

    products: float = 0.6
    """Share of the peak FLOP/s that matrix products reach (MFU)."""
    attention: float = 0.4
    """Share of the peak FLOP/s that the attention of prompt chunks reaches."""
    memory: float = 0.7
    """Share of the peak memory bandwidth that a step reaches (MBU)."""
    wire: float = 0.8
    """Share of the bandwidth that transfers over network and links reach."""
    launch_s: float = 1e-3
    """Time that a step takes for other work (launches, sampling, planning), in seconds."""


DEFAULT_EFFICIENCY = Efficiency()


class AnalyticalCosts:
    """Implements ``planning.simulator.costs.step_model.StepCostModel``."""

    def __init__(
        self,
        gpu: Accelerator,
        model: ModelShape,
        efficiency: Efficiency = DEFAULT_EFFICIENCY,
        *,
        weight_bytes: float = 2.0,
        tensor_parallel: int = 1,
    ) -> None:
        """``weight_bytes`` is the number of bytes per weight. If it is 1, matrix products have
        8-bit inputs.

        KV has two bytes per value. ``tensor_parallel`` GPUs of one machine divide a worker's work
        evenly.
        """
        self.gpu = gpu
        self.model = model
        self.efficiency = efficiency
        self.weight_bytes = weight_bytes
        self.tensor_parallel = tensor_parallel
        self.kv_token_bytes = model.kv_token_bytes(2.0)
        """Bytes of one token's KV, over all GPUs of the worker."""
        flops = gpu.eight_bit_flops if weight_bytes <= 1 else gpu.flops
        self.peak = Peak(flops * tensor_parallel, gpu.memory_bytes_per_s * tensor_parallel)
        """Peak rates of all GPUs of the worker. If weights have 8 bits, attention has a lower peak
        than this, since KV has 16 bits."""
        self._pair_flops = 4.0 * model.layers * model.heads * model.head_dim
        self._flops_per_s = flops * efficiency.products * tensor_parallel
        self._bytes_per_s = gpu.memory_bytes_per_s * efficiency.memory * tensor_parallel
        self._pair_s = self._pair_flops / (gpu.flops * efficiency.attention * tensor_parallel)
        self._kv_s = self.kv_token_bytes / self._bytes_per_s
        self._lines: dict[int, DecodeLine] = {}
        self._fitted: StepCosts | None = None

    def seconds(self, shape: StepLoad) -> float:
        """Implement ``StepCostModel``."""
        line = self.decode_line(shape.decodes)
        if not shape.chunks:
            return line.seconds(shape.context_tokens)
        pairs = sum(_pairs(*chunk) for chunk in shape.chunks)
        held = sum(count + start for count, start in shape.chunks)
        chunks = max(self._pair_s * pairs, self._kv_s * held)
        rows = shape.decodes + len(shape.chunks)
        decodes = line.per_token_s * shape.context_tokens
        return self._products_s(shape.tokens, rows) + chunks + decodes

    def work(self, shape: StepLoad) -> StepWork:
        """Implement ``StepCostModel``."""
        rows = shape.decodes + len(shape.chunks)
        pairs = shape.context_tokens + sum(_pairs(*chunk) for chunk in shape.chunks)
        held = shape.context_tokens + sum(count + start for count, start in shape.chunks)
        flops, weights = self._products(shape.tokens, rows)
        return StepWork(flops + self._pair_flops * pairs, weights + self.kv_token_bytes * held)

    def decode_line(self, batch: int) -> DecodeLine:
        """Implement ``StepCostModel``."""
        line = self._lines.get(batch)
        if line is None:
            # Products of queries and keys are short compared with reading the keys, except if many
            # heads share them.
            per_token_s = max(self._pair_s, self._kv_s)
            line = self._lines[batch] = DecodeLine(self._products_s(batch, batch), per_token_s)
        return line

    def step_costs(self) -> StepCosts:
        """Implement ``StepCostModel`` with the fit that workers make of their measurements."""
        if self._fitted is None:
            self._fitted = self._fit()
        return self._fitted

    def _fit(self) -> StepCosts:
        chunks = [(n, n * (start + n / 2)) for n, start in _CHUNKS]
        chunk_ms = [self.seconds(StepLoad(0, 0, (chunk,))) * 1e3 for chunk in _CHUNKS]
        steps = [(batch, batch * start) for batch, start in _BATCHES]
        shapes = [StepLoad(batch, batch * start) for batch, start in _BATCHES]
        step_ms = [self.seconds(shape) * 1e3 for shape in shapes]
        return StepCosts(fit(chunks, chunk_ms), fit(steps, step_ms))

    def _products_s(self, tokens: int, rows: int) -> float:
        """Return the seconds of a step without attention, for ``tokens`` computed tokens and
        ``rows`` rows of logits."""
        flops, size = self._products(tokens, rows)
        longest = max(flops / self._flops_per_s, size / self._bytes_per_s)
        return longest + self._reduce_s(tokens) + self.efficiency.launch_s

    def _products(self, tokens: int, rows: int) -> tuple[float, float]:
        """Return the FLOPs and the weight bytes of a step's matrix products, for ``tokens``
        computed tokens and ``rows`` rows of logits.
        """
        model = self.model
        flops = 2.0 * (model.used_weights * tokens + model.head_weights * rows)
        return flops, (model.read_weights(tokens) + model.head_weights) * self.weight_bytes

    def _reduce_s(self, tokens: int) -> float:
        """Return the seconds of a step's all-reduces: two per layer, in a ring."""
        parts = self.tensor_parallel
        if parts == 1:
            return 0.0
        size = 2.0 * tokens * self.model.hidden * 2 * (parts - 1) / parts
        once = size / (self.gpu.link_bytes_per_s * self.efficiency.wire) + _REDUCE_LATENCY_S
        return 2 * self.model.layers * once


def _pairs(count: int, start: int) -> float:
    """Return the number of pairs of a query and a key in the attention of a chunk. ``count`` is the
    number of tokens in the chunk, ``start`` the number before it. Each token attends to itself and
    to those before it."""
    return count * (start + (count + 1) / 2)
