"""How much memory a worker's device has, and what of it is used."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.host.host_memory import limit_bytes, resident_bytes


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """In bytes."""

    used: int
    """On a GPU by all processes; on a CPU by this one."""
    total: int
    """Of the GPU; on a CPU that of the machine, or its container's limit."""


def device_memory(device: torch.device) -> DeviceMemory:
    """The memory of a device now."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total - free, total)
    return DeviceMemory(resident_bytes(), limit_bytes())
