"""Which errors of a step mean that its device is lost, and how an error is described.

A CUDA context that has had a fault (an illegal address, a failed launch, an ECC or Xid error)
returns the same error from every later call, until its process ends. An error of cuBLAS, cuDNN or
NCCL also leaves a state that cannot be reset. ``torch.OutOfMemoryError`` is different: torch's
allocator releases its memory and continues.

For errors of CUDA calls, torch raises ``torch.AcceleratorError`` since 2.8, and before that a plain
RuntimeError with the same text. Triton and torch's libraries raise RuntimeErrors of their own. So
both type and text decide. Pure: it makes no calls to a device.
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
"""The exception class that torch raises for CUDA errors; None before torch 2.8."""


def is_device_fault(error: BaseException) -> bool:
    """Whether the process has to end, because this error or one of its causes shows that the CUDA
    device is lost."""
    return any(_is_fault(each) for each in _with_causes(error))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that the device or the host ran out of memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # Torch has no exception type for host memory.
    return isinstance(error, RuntimeError) and _NO_HOST_MEMORY in str(error)


def described(error: BaseException) -> str:
    """Return an error's type and the first line of its text. The other lines are left out, because
    torch adds advice there."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def without_frames(error: Exception) -> Exception:
    """Remove an error's tracebacks, which keep tensors alive. Returns the error."""
    for each in _with_causes(error):
        each.__traceback__ = None
    return error


def _is_fault(error: BaseException) -> bool:
    if is_out_of_memory(error) or not isinstance(error, RuntimeError):
        # The text of other errors may quote user input.
        return False
    if _ACCELERATOR_ERROR is not None and isinstance(error, _ACCELERATOR_ERROR):
        return True
    return _LOST.search(str(error)) is not None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its causes, and the errors during whose handling it was raised."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        yield each
        each = each.__cause__ or each.__context__
