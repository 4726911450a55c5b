"""A kernel's launch as data, so that what is compiled ahead of time is what will be launched."""

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
"""The compute capability that is assumed where there is no GPU: its code paths run everywhere."""

_described: ContextVar[_Described | None] = ContextVar("_described", default=None)


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a Triton kernel; the tensors may be on the ``meta`` device to describe it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Argument]
    constants: dict[str, Constant]
    warps: int = 4
    stages: int = 2
    fusion: bool = True
    """Whether a product and a sum may become one operation, rounded once, where the compiler will.
    """

    def run(self) -> None:
        """Start the kernel on its tensors' device. An empty grid starts nothing, and tensors on the

        ``meta`` device start nothing: there the launch goes to ``describe``.
        """
        if 0 in self.grid:
            return
        device = next(x.device for x in self.arguments.values() if isinstance(x, torch.Tensor))
        if device.type == "meta":
            described = _described.get()
            assert described is not None, "launches on meta tensors need describe()"
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
    """Within the block tensors on the ``meta`` device stand for those of a GPU of ``capability``,

    and ``note`` gets each launch that code on them would start.
    """
    token = _described.set(_Described(capability, note))
    try:
        yield
    finally:
        _described.reset(token)


def interpreted(kernel: Callable[..., Any]) -> bool:
    """Whether triton interprets ``kernel`` on the CPU (TRITON_INTERPRET=1).

    Its arithmetic on bf16 and fp8 is wrong, so that kernels widen to fp32 after each load there.
    """
    return not isinstance(kernel, triton.runtime.JITFunction)


def capability_of(tensor: torch.Tensor) -> int:
    """10 * major + minor of the GPU that ``tensor`` is on; the oldest supported one for others.

    For a tensor on the ``meta`` device it is what ``describe`` says.
    """
    if tensor.device.type == "meta" and (described := _described.get()) is not None:
        return described.capability
    if tensor.device.type != "cuda":
        return _OLDEST
    major, minor = torch.cuda.get_device_capability(tensor.device)
    return 10 * major + minor


def power_of_two(number: int) -> int:
    """The least power of two that is not below ``number``."""
    return 1 << max(0, number - 1).bit_length()


def check_strides(tensor: torch.Tensor, name: str) -> None:
    """Raises ValueError unless the last dimension of ``tensor`` is contiguous."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must be contiguous in its last dimension")
