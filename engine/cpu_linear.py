"""Linear layers for a few rows on the CPU: cpu_linear.cpp."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from engine.cpu_library import cpu_library

MOST_ROWS = 32
"""With more rows the arithmetic counts, and torch's matrix product is the faster one."""

LinearKernel = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, torch.dtype], torch.Tensor
]
"""(x [rows, in], weight [out, in], bias [out] or None, dtype of the result) → [rows, out]."""


def linear_kernel() -> LinearKernel | None:
    """The kernel, or None where torch is to compute."""
    library = cpu_library()
    if library is None:
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_long
    function = library.baton_linear
    function.argtypes = [pointer] * 5 + [size] * 3 + [ctypes.c_int]
    function.restype = None

    def linear(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """bf16 inputs, sums in fp32, a result of fp32 or bf16. All tensors contiguous."""
        rows, width = x.shape
        out = torch.empty(rows, weight.shape[0], dtype=dtype)
        is_float = dtype == torch.float32
        function(
            x.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr() if is_float else None,
            None if is_float else out.data_ptr(),
            rows,
            weight.shape[0],
            width,
            torch.get_num_threads(),
        )
        return out

    return linear
