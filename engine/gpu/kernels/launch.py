"""Describes a kernel's launch as data, so that ahead-of-time compilation uses the same launches as
a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import triton

Argument = torch.Tensor | int | float | None
Constant = int | float | bool | None

_OLDEST = 80
"""Compute capability that is assumed if there is no GPU. Every supported GPU has this capability or
a higher one."""

_described: ContextVar[_Described | None] = ContextVar("_described", default=None)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel. If it is only described and not run, tensors may be on the
    ``meta`` device."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Argument]
    constants: dict[str, Constant]
    warps: int = 4
    stages: int = 2
    fusion: bool = True
    """Whether the compiler may fuse a product and a sum into one operation that rounds once."""

    def run(self) -> None:
        """Start the kernel on the device of its tensors.

        Nothing is started for an empty grid. For tensors on the ``meta`` device, the launch is
        passed to the ``note`` of ``describe``.
        """
        if 0 in self.grid:
            return
        device = next(x.device for x in self.arguments.values() if isinstance(x, torch.Tensor))
        if device.type == "meta":
            described = _described.get()
            assert described is not None, (
                "launches on meta tensors are possible only within describe()"
            )
            described.note(self)
            return
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[self.grid](
                **self.arguments,
                **self.constants,
                num_warps=self.warps,
                num_stages=self.stages,
                enable_fp_fusion=self.fusion,
            )


@dataclass(frozen=True, slots=True)
class _Described:
    capability: int
    note: Callable[[Launch], None]


@contextmanager
def describe(capability: int, note: Callable[[Launch], None]) -> Iterator[None]:
    """Let tensors on the ``meta`` device stand for those of a GPU of ``capability``.

    ``note`` is called with each launch that code on these tensors would start within this context.
    """
    token = _described.set(_Described(capability, note))
    try:
        yield
    finally:
        _described.reset(token)


def interpreted(kernel: Callable[..., Any]) -> bool:
    """Whether triton interprets ``kernel`` on the CPU (TRITON_INTERPRET=1).

    The interpreter's arithmetic on bf16 and fp8 is wrong, so kernels then convert to fp32 after
    each load.
    """
    return not isinstance(kernel, triton.runtime.JITFunction)


def capability_of(tensor: torch.Tensor) -> int:
    """Return 10 * major + minor of the compute capability of the tensor's GPU; for other devices,
    that of the oldest supported GPU.

    For a tensor on the ``meta`` device, it is the capability given to ``describe``.
    """
    if tensor.device.type == "meta" and (described := _described.get()) is not None:
        return described.capability
    if tensor.device.type != "cuda":
        return _OLDEST
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(0, number - 1).bit_length()


def check_strides(tensor: torch.Tensor, name: str) -> None:
    """Raise ValueError unless the last dimension of ``tensor`` is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")
