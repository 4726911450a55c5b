"""Which device a worker computes on, and how much of it is its own."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """A device by torch's name, and the share of its memory."""

    device: str
    memory_fraction: float


def place(
    device: str, memory_fraction: float, *, number: int, workers_here: int, gpus: int
) -> Placement:
    """Give worker ``number`` of ``workers_here`` its device on a machine with ``gpus`` GPUs.

    Workers take the GPUs in turn; those that share one divide ``memory_fraction`` evenly.
    """
    if device == "cpu" or (device == "auto" and gpus == 0):
        return Placement("cpu", memory_fraction)
    if gpus == 0:
        return Placement(device, memory_fraction)
    gpu = number % gpus
    sharing = len(range(gpu, workers_here, gpus))
    return Placement(f"cuda:{gpu}", memory_fraction / max(1, sharing))
