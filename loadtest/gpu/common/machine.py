"""Versions, and what the device does at best."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial

import torch
import triton

from engine.roofline import measure_ceilings
from loadtest.gpu.common.place import Place
from loadtest.gpu.common.results import Fact, Item

_SMI = "name,driver_version,memory.total,memory.free,clocks.max.sm,power.limit,compute_cap"
_SMI_S = 10.0


def machine_items(place: Place) -> Iterator[Item]:
    """Facts alone."""
    yield Item("versions", partial(_versions, place))
    yield Item("ceilings", partial(_ceilings, place))


def device_name(place: Place) -> str:
    """As CUDA calls it."""
    return torch.cuda.get_device_name(place.device) if place.on_gpu else "CPU, interpreted"


def versions(place: Place) -> dict[str, str]:
    """What results depend on."""
    return {
        "device": device_name(place),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _versions(place: Place) -> Iterator[Fact]:
    yield Fact("versions", {**versions(place), "cuda": torch.version.cuda or "none"})
    if not place.on_gpu:
        return
    properties = torch.cuda.get_device_properties(place.device)
    yield Fact(
        "device",
        {
            "processors": properties.multi_processor_count,
            "bytes": properties.total_memory,
            "capability": list(torch.cuda.get_device_capability(place.device)),
        },
    )
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        command = [smi, f"--query-gpu={_SMI}", "--format=csv"]
        found = subprocess.run(  # noqa: S603 - found on the path
            command, capture_output=True, text=True, timeout=_SMI_S, check=False
        )
        yield Fact("nvidia-smi", {"answer": (found.stdout or found.stderr).strip()[:2000]})


def _ceilings(place: Place) -> Iterator[Fact]:
    """Of a CPU none are measured: a dry run has no use for them."""
    if place.on_gpu:
        found = measure_ceilings(place.device, place.dtype)
        values = {"bytes_per_s": found.bytes_per_s, "operations_per_s": found.operations_per_s}
        yield Fact("ceilings", values)
