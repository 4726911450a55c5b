"""A linear layer: torch's, or the CPU kernel where that is faster."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.cpu_linear import MOST_ROWS, LinearKernel, linear_kernel


class Linear:
    """``x @ weight.T + bias``; weight [out, in], x [rows, in]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self._kernel: LinearKernel | None = None
        plain = weight.is_contiguous() and (bias is None or bias.is_contiguous())
        if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and plain:
            self._kernel = linear_kernel()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, out], of the weight's type."""
        if self._kernel is not None and x.shape[0] <= MOST_ROWS:
            return self._kernel(x.contiguous(), self._weight, self._bias, torch.bfloat16)
        return F.linear(x, self._weight, self._bias)

    def to_float(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, out]; not rounded to the weight's type first where the kernel runs."""
        if self._kernel is not None and x.shape[0] <= MOST_ROWS:
            return self._kernel(x.contiguous(), self._weight, self._bias, torch.float32)
        return F.linear(x, self._weight, self._bias).float()
