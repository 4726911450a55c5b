"""The gated activations of feed-forward layers (Shazeer, 2020): SwiGLU and GeGLU."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
import triton
import triton.language as tl

from engine.gpu.kernels.launch import Launch, check_strides

Gating = Literal["silu", "gelu_tanh"]

_TILE = 1024


@triton.jit  # type: ignore[untyped-decorator]
def gate_kernel(  # type: ignore[no-untyped-def]
    gate, up, out, stride_gate, stride_up, inner, gelu: tl.constexpr, tile: tl.constexpr
):
    """Compute the gated activation of a tile of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at < inner
    x = tl.load(gate + row * stride_gate + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(up + row * stride_up + at, mask=inside, other=0.0).to(tl.float32)
    factor = x
    if gelu:
        # 0.5 * (1 + tanh(z)) = sigmoid(2z), with z = sqrt(2 / pi) * (x + 0.044715 x³)
        factor = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    # Beyond ±80 a sigmoid is 0 or 1 in fp32, and its exponential stays finite.
    factor = 1.0 / (1.0 + tl.exp(-tl.minimum(tl.maximum(factor, -80.0), 80.0)))
    tl.store(out + row * inner + at, (x * factor * y).to(out.dtype.element_ty), mask=inside)


def gated(gate: torch.Tensor, up: torch.Tensor, gating: Gating) -> torch.Tensor:
    """Compute ``silu(gate) * up``, or the same with GELU in its tanh form. The result is
    contiguous, in the type of ``gate``.

    Both are fp32, bf16 or fp16 [rows, inner], contiguous in the last dimension, so that they may be
    the halves of one projection. Computed in fp32, rounded once. Raises ValueError for other
    inputs.
    """
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    gate_launch(out, gate, up, gating).run()
    return out


def gate_launch(out: torch.Tensor, gate: torch.Tensor, up: torch.Tensor, gating: Gating) -> Launch:
    """Describe the kernel launch that computes ``gated`` into ``out``."""
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.dim() != 2:
        raise ValueError("gate and up must have the same shape [rows, inner] and type")
    check_strides(gate, "gate")
    check_strides(up, "up")
    rows, inner = gate.shape
    return Launch(
        gate_kernel,
        (rows, -(-inner // _TILE)),
        {
            "gate": gate,
            "up": up,
            "out": out,
            "stride_gate": gate.stride(0),
            "stride_up": up.stride(0),
            "inner": inner,
        },
        {"gelu": gating == "gelu_tanh", "tile": _TILE},
    )


def gated_reference(gate: torch.Tensor, up: torch.Tensor, gating: Gating) -> torch.Tensor:
    """The reference for ``gated``, in plain torch."""
    x = gate.float()
    activated = F.silu(x) if gating == "silu" else F.gelu(x, approximate="tanh")
    return (activated * up.float()).to(gate.dtype)
