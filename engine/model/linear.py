"""A linear layer, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.quantization.weight import QuantizedWeight, dequantize


class Linear:
    """``x @ weight.T + bias``; weight [out, in], x [rows, in]."""

    def __init__(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._dense = weight if isinstance(weight, torch.Tensor) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, out], of the type of ``x``."""
        return F.linear(x, self._matrix(x.dtype), self.bias)

    def to_float(self, x: torch.Tensor) -> torch.Tensor:
        """fp32 [rows, out]."""
        return self(x).float()

    def _matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """A quantised weight is dequantised once, when torch is first asked to multiply by it."""
        if self._dense is None:
            assert isinstance(self.weight, QuantizedWeight)
            self._dense = dequantize(self.weight).to(dtype)
        return self._dense
