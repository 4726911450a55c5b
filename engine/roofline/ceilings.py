"""What this device can do at best, measured: memory bandwidth and matrix products."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.roofline.roofline import Ceilings

_WARM, _REPETITIONS = 2, 7
_MEMORY_BYTES = {"cpu": 1 << 29, "cuda": 1 << 30}
"""Far more than any cache holds."""
_PRODUCTS = {
    "cpu": ((1024, 1024, 4096), (2048, 2048, 2048), (1024, 4096, 4096)),
    "cuda": ((8192, 8192, 8192), (4096, 4096, 16384)),
}
"""Rows, inputs, outputs: the best of them counts."""


def elapsed(device: torch.device, work: Callable[[], object]) -> float:
    """Seconds that ``work`` takes, on a GPU by its own clock (CUDA events)."""
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
    """The shortest of seven, after two that do not count: other work on the machine only adds."""
    for _ in range(_WARM):
        work()
    return min(elapsed(device, work) for _ in range(_REPETITIONS))


@torch.inference_mode()
def measure_ceilings(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Memory bandwidth and the rate of matrix products in ``dtype``, with the threads that torch

    has at the moment. The bandwidth is that of reading on a CPU, which is what steps do most, and
    that of copying on a GPU, bytes read and bytes written together, as is the custom there.
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
