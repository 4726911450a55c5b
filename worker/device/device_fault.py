"""Which errors of a step tell that its device is lost, and what is said of an error.

A CUDA context that has had a fault (an illegal address, a failed launch, an ECC or Xid error) gives
the same error to every later call, until its process ends. An error of cuBLAS, cuDNN or NCCL leaves
a state that nothing resets, either. ``torch.OutOfMemoryError`` is another matter: torch's allocator
gives its memory back and goes on.

Torch raises ``torch.AcceleratorError`` for errors of CUDA calls since 2.8, and a plain RuntimeError
with the same text before; Triton and torch's libraries raise RuntimeErrors of their own. So type
and text decide. Pure: no call of a device is made here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch

_LOST = re.compile(
    r"\bcuda (driver )?error|\bcuda_error_|\berror \[cuda\]|device-side assert|"
    r"\bcublas|\bcudnn|\bcusolver|nccl|\becc error|\bxid\b",
    re.IGNORECASE,
)
_NO_HOST_MEMORY = "DefaultCPUAllocator: "
_ACCELERATOR_ERROR: type[Exception] | None = getattr(torch, "AcceleratorError", None)
"""None before torch 2.8."""


def is_device_fault(error: BaseException) -> bool:
    """Whether the process has to end: this error, or one that led to it, tells of a lost device."""
    return any(_is_fault(each) for each in _with_causes(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or the host, had no memory left."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Torch has no type of its own for memory of the host.
    return isinstance(error, RuntimeError) and _NO_HOST_MEMORY in str(error)


def described(error: BaseException) -> str:
    """An error's type and the first line of its text: torch adds lines of advice to errors."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def without_frames(error: Exception) -> Exception:
    """The error itself, without the frames in which it was raised: their tensors are freed."""
    for each in _with_causes(error):
        each.__traceback__ = None
    return error


def _is_fault(error: BaseException) -> bool:
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        # Other errors may quote what a user wrote.
        return False
    if _ACCELERATOR_ERROR is not None and isinstance(error, _ACCELERATOR_ERROR):
        return True
    return _LOST.search(str(error)) is not None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and those in whose handling it was raised."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__
