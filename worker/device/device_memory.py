"""Memory of a worker's device, in total and in use."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.host.host_memory import limit_bytes, resident_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Used and total memory of a device, in bytes."""

    used: int
    """Bytes in use: those of all processes on a GPU, or those of this process on a CPU."""
    total: int
    """Total bytes of the GPU. On a CPU, the bytes of the machine's memory or of its container's
    limit."""


def device_memory(device: torch.device) -> DeviceMemory:
    """Return the used and the total memory of a device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total - free, total)
    return DeviceMemory(resident_bytes(), limit_bytes())
