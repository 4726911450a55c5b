"""Defines the device of checks and measurements: a GPU, an interpreter, or none."""

from __future__ import annotations

import platform
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton

from engine.gpu.graphs import Capture, CudaCapture, Work
from engine.roofline import measure_ceilings
from loadtest.gpu.common.results import Check, Fact, Item

_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Maximum error that a check allows for each data type, relative to the largest expected value."""


@dataclass(frozen=True)
class Place:
    """A device and the sizes that suit it.

    On ``cuda`` everything runs at full size. On ``cpu`` kernels are interpreted at small sizes: a
    dry run. On ``meta`` nothing is computed at full size: kernel launches are only described, so
    that the kernels can be compiled.
    """

    device: torch.device
    dtype: torch.dtype
    small: bool

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def describes(self) -> bool:
        """Whether tensors on this device have no values. Kernel launches are then described, but
        not run."""
        return self.device.type == "meta"

    def with_dtype(self, dtype: torch.dtype) -> Place:
        """Return the same place with another type of weights."""
        return Place(self.device, dtype, self.small)

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).to(self.dtype)

    def integers(self, *numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def check(
        self, name: str, found: torch.Tensor, expected: torch.Tensor, *, by_row: bool = False
    ) -> Check:
        """Compare ``found`` with ``expected``. The error is the largest difference relative to the
        largest expected value; the limit is that of the data type.

        With ``by_row``, the error of each row is relative to the row's own largest value, since
        rows differ in size.
        """
        limit = _LIMITS[self.dtype]
        if self.describes:
            return Check(name, 0.0, limit)
        error, size = (found.float() - expected.float()).abs(), expected.float().abs()
        if by_row:
            return Check(
                name, float((error.flatten(1).amax(1) / size.flatten(1).amax(1)).max()), limit
            )
        return Check(name, float(error.max() / size.max()), limit)

    def capture(self) -> Capture:
        """Return the way in which steps are captured: as CUDA graphs, or as functions that run
        again.
        """
        return CudaCapture(self.device) if self.on_gpu else _run_again


def _run_again(work: Work) -> Work:
    work()
    return work


def permutation(count: int, seed: int = 0) -> list[int]:
    """Return the numbers from 0 to ``count`` - 1 in a pseudorandom, reproducible order."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = torch.randperm(count, generator=generator).tolist()
    return found


def padded(place: Place, tables: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return block tables for kernels: int32 [sequences, blocks of the longest, padded to 4]."""
    width = -(-max(len(table) for table in tables) // 4) * 4
    rows = [[*table, *[0] * (width - len(table))] for table in tables]
    return torch.tensor(rows, dtype=torch.int32, device=place.device)


_SMI = "name,driver_version,memory.total,memory.free,clocks.max.sm,power.limit,compute_cap"
_SMI_S = 10.0


def machine_items(place: Place) -> Iterator[Item]:
    """Yield an item that reports facts about the machine."""
    yield Item("versions", partial(_versions, place))
    yield Item("ceilings", partial(_ceilings, place))


def device_name(place: Place) -> str:
    """Return the device's name as CUDA reports it."""
    return torch.cuda.get_device_name(place.device) if place.on_gpu else "CPU, interpreted"


def versions(place: Place) -> dict[str, str]:
    """Return the versions of software on which results depend."""
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
    """Measure the device's peak rates. On a CPU none are measured, since a dry run does not need
    them.
    """
    if place.on_gpu:
        found = measure_ceilings(place.device, place.dtype)
        values = {"bytes_per_s": found.bytes_per_s, "operations_per_s": found.operations_per_s}
        yield Fact("ceilings", values)
