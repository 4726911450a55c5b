"""Computes the minimum work of a step, and the minimum time that this work takes.

Source: Williams et al., Roofline: An Insightful Visual Performance Model for Multicore
Architectures, 2009. The work consists of the weights, the KV and their arithmetic. It excludes
activations, which mostly stay in caches, and norms, rotations and sampling, which are small in
comparison. So the times are lower bounds. The device's memory bandwidth and its rate of matrix
products are measured.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.checkpoint.model_config import ModelConfig
from engine.scheduling.plan import PlanRow

Numbers = npt.NDArray[np.int64]
Bound = Literal["memory", "arithmetic"]


@dataclass(frozen=True, slots=True)
class Work:
    """The minimum work of a step: bytes that cross the memory bus at least once, and operations (a
    multiply-add is two)."""

    weight_bytes: float
    kv_bytes: float
    operations: float

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            self.weight_bytes + other.weight_bytes,
            self.kv_bytes + other.kv_bytes,
            self.operations + other.operations,
        )


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured peak rates of the device: memory bandwidth and operations per second."""

    bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes per weight and per token of KV in a loaded model."""

    weight_bytes: float
    """Bytes per weight of the layers' matrices, including a weight's share of its scale."""
    head_weight_bytes: float
    """Bytes per weight of the head."""
    kv_token_bytes: float
    """Bytes of KV per token in all layers."""


@dataclass(frozen=True, slots=True)
class Roof:
    """The measured time of a step, compared with the minimum time for its work."""

    work: Work
    ceilings: Ceilings
    seconds: float
    """Measured duration of the step, in seconds."""

    @property
    def memory_s(self) -> float:
        """Minimum seconds to move the bytes of the step's work at the measured bandwidth."""
        return self.work.bytes / self.ceilings.bytes_per_s

    @property
    def arithmetic_s(self) -> float:
        """Minimum seconds to compute the operations of the step's work at the measured rate."""
        return self.work.operations / self.ceilings.operations_per_s

    @property
    def mbu(self) -> float:
        """Memory bandwidth utilization: achieved bandwidth divided by measured peak bandwidth."""
        return self.memory_s / self.seconds

    @property
    def mfu(self) -> float:
        """Model FLOPs utilization: achieved operations per second divided by the measured peak
        rate."""
        return self.arithmetic_s / self.seconds

    @property
    def bound(self) -> Bound:
        """Whether memory or arithmetic limits the step: the one with the longer minimum time."""
        return "memory" if self.memory_s >= self.arithmetic_s else "arithmetic"

    @property
    def over_floor(self) -> float:
        """Duration of the step divided by the longer of its two minimum times."""
        return self.seconds / max(self.memory_s, self.arithmetic_s)


def step_work(config: ModelConfig, storage: Storage, rows: Sequence[PlanRow]) -> Work:
    """Compute the minimum work of one step that computes ``rows``."""
    start = np.array([row.start for row in rows], dtype=np.int64)
    end = start + np.array([row.count for row in rows], dtype=np.int64)
    tokens = int((end - start).sum())
    sampled = sum([row.sample for row in rows])
    head = config.vocab_size * config.hidden_size
    held, used = _matrix_weights(config, tokens)
    moved, pairs = _attention(config, start, end)
    kv_layer = storage.kv_token_bytes / config.layers
    return Work(
        weight_bytes=storage.weight_bytes * held
        + storage.head_weight_bytes * (head if sampled else 0),
        kv_bytes=kv_layer * moved,
        operations=2.0 * (used * tokens + head * sampled)
        # Queries times keys, and weights times values.
        + 4.0 * config.heads * config.head_dim * pairs,
    )


def total(works: Iterable[Work]) -> Work:
    """Sum the work of several steps."""
    return sum(works, Work(0.0, 0.0, 0.0))


def _matrix_weights(config: ModelConfig, tokens: int) -> tuple[float, float]:
    """Count the weights of all layers' matrices: (weights that the step reads, weights that each
    token uses).

    For a mixture of experts, it is assumed that each token chooses its experts at random.
    """
    hidden = config.hidden_size
    wide, narrow = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention = hidden * (2 * wide + 2 * narrow) * config.layers
    mlp = 3 * hidden * config.intermediate_size
    experts = config.experts
    if experts is None:
        dense = float(attention + mlp * config.layers)
        return dense, dense
    mixed = len(experts.layers)
    dense = float(attention + mlp * (config.layers - mixed) + hidden * experts.count * mixed)
    expert = 3 * hidden * experts.intermediate_size
    met = experts.count * (1.0 - (1.0 - experts.per_token / experts.count) ** tokens)
    return dense + expert * met * mixed, dense + expert * experts.per_token * mixed


def _attention(config: ModelConfig, start: Numbers, end: Numbers) -> tuple[int, int]:
    """Count over all layers and rows: (tokens whose KV is read or written, pairs of a query and a
    key). A row computes the tokens ``start … end - 1`` of its sequence; both are [rows]."""
    moved = pairs = 0
    for window, layers in _layers_by_window(config.windows):
        reach = np.full_like(end, window) if window else end
        first = np.maximum(0, start + 1 - reach)
        moved += layers * int((end - first).sum())
        pairs += layers * int((_pairs(end, reach) - _pairs(start, reach)).sum())
    return moved, pairs


@lru_cache(maxsize=8)
def _layers_by_window(windows: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """List the distinct attention windows with their numbers of layers; there are only one or two
    windows."""
    return tuple(Counter(windows).items())


def _pairs(length: Numbers, reach: Numbers) -> Numbers:
    """Count the pairs of a query and a key for the first ``length`` tokens of each row; each query
    sees at most ``reach`` keys. Arguments and result are [rows]."""
    short = np.minimum(length, reach)
    found: Numbers = short * (short + 1) // 2 + (length - short) * reach
    return found


_WARM, _REPETITIONS = 2, 7
_MEMORY_BYTES = {"cpu": 1 << 29, "cuda": 1 << 30}
"""Bytes that are streamed to measure bandwidth: far more than any cache holds."""
_PRODUCTS = {
    "cpu": ((1024, 1024, 4096), (2048, 2048, 2048), (1024, 4096, 4096)),
    "cuda": ((8192, 8192, 8192), (4096, 4096, 16384)),
}
"""Shapes of the matrix products that are measured, as (rows, inputs, outputs). The fastest gives
the peak rate."""


def elapsed(device: torch.device, work: Callable[[], object]) -> float:
    """Measure the seconds that ``work`` takes. On a GPU, its own clock is used (CUDA events)."""
    if device.type != "cuda":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        first.record()
        work()
        last.record()
        last.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def best_elapsed(device: torch.device, work: Callable[[], object]) -> float:
    """Measure the seconds that ``work`` takes: the shortest of seven runs after two warm-up runs.
    Other work on the machine only adds time."""
    for _ in range(_WARM):
        work()
    return min(elapsed(device, work) for _ in range(_REPETITIONS))


@torch.inference_mode()
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Measure memory bandwidth and the rate of matrix products in ``dtype``.

    Uses torch's current number of threads. On a CPU the bandwidth is that of reading, which is most
    of a step. On a GPU it is that of copying, where bytes read and bytes written both count, as is
    customary.
    """
    return Ceilings(_bytes_per_s(device), _operations_per_s(device, dtype))


def _bytes_per_s(device: torch.device) -> float:
    source = torch.ones(_MEMORY_BYTES[device.type] // 4, device=device)
    if device.type == "cpu":
        return source.nbytes / best_elapsed(device, source.sum)
    target = torch.empty_like(source)
    return 2 * source.nbytes / best_elapsed(device, lambda: target.copy_(source))


def _operations_per_s(device: torch.device, dtype: torch.dtype) -> float:
    rates = []
    for rows, inputs, outputs in _PRODUCTS[device.type]:
        x = torch.randn(rows, inputs, device=device).to(dtype)
        weight = torch.randn(outputs, inputs, device=device).to(dtype)
        seconds = best_elapsed(device, _product(x, weight))
        rates.append(2 * rows * inputs * outputs / seconds)
    return max(rates)


def _product(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], torch.Tensor]:
    return lambda: F.linear(x, weight)
