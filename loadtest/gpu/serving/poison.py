"""Breaks a process's CUDA context on purpose, as a wrong kernel would.

An illegal address is a sticky error: every later CUDA call of the process fails with it.
"""

from __future__ import annotations

import contextlib

import torch
import triton
import triton.language as tl

_NOWHERE = 16
"""An illegal address: no allocation contains it."""


@triton.jit
def store_kernel(address):  # type: ignore[no-untyped-def]
    """Load an int64 from ``address``, and store the int32 1 at the address that was loaded."""
    tl.store(tl.load(address).to(tl.pointer_type(tl.int32)), 1)


class ContextPoison:
    """A compiled kernel that is ready to store at an illegal address."""

    def __init__(self, device: torch.device) -> None:
        """Compile the kernel, and check that it stores at a legal address of ``device``."""
        self._device = device
        legal = torch.zeros(1, dtype=torch.int32, device=device)
        self._launch(torch.tensor([legal.data_ptr()], device=device))
        assert legal.item() == 1, "the kernel stores nothing"
        self._nowhere = torch.tensor([_NOWHERE], device=device)

    def spread(self) -> None:
        """Break the process's CUDA context. Any thread may call this."""
        # The error may appear here first.
        with contextlib.suppress(RuntimeError):
            self._launch(self._nowhere)

    def _launch(self, address: torch.Tensor) -> None:
        # A new thread has the first device as its current one.
        with torch.cuda.device(self._device):
            store_kernel[(1,)](address)
