"""Linear layers whose sums have a fixed order: the bits of a row depend only on the row.

cuBLAS chooses its kernel by the number of rows, and with it the order of the sums. Here the tile
depends only on the weight's shape, and programs never split the inputs. A row's part of a matrix
instruction does not depend on other rows (He et al., "Defeating Nondeterminism in LLM Inference",
Thinking Machines, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.launch import Launch, check_strides, interpreted

_WIDE_OUTPUTS = 8192
"""Number of outputs from which tiles of twice the width still occupy every multiprocessor of an
H200."""
_BAND = 8
"""Number of tiles of rows that use the same weights one after another, so that the weights are
still in the L2 cache."""


@dataclass(frozen=True, slots=True)
class FixedTile:
    """Tile sizes for a weight: the rows, outputs and inputs that one step of a program computes."""

    rows: int
    outputs: int
    inputs: int


def fixed_tile(outputs: int, itemsize: int) -> FixedTile:
    """Choose the tile sizes for a weight with ``outputs`` outputs and ``itemsize`` bytes per
    element.

    They do not depend on the number of rows.
    """
    wide = 128 if outputs >= _WIDE_OUTPUTS else 64
    return FixedTile(64, wide, 32 if itemsize == 4 else 64)


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def fixed_linear_kernel(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    stride_x,
    stride_weight,
    tile_rows: tl.constexpr,
    tile_outputs: tl.constexpr,
    tile_inputs: tl.constexpr,
    band: tl.constexpr,
    biased: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute one tile of the layer's outputs, over all inputs in order."""
    row_tiles = (rows + tile_rows - 1) // tile_rows
    output_tiles = (outputs + tile_outputs - 1) // tile_outputs
    number = tl.program_id(0)
    first_row_tile = number // (band * output_tiles) * band
    height = tl.minimum(row_tiles - first_row_tile, band)
    row_tile = first_row_tile + number % (band * output_tiles) % height
    output_tile = number % (band * output_tiles) // height
    row = row_tile * tile_rows + tl.arange(0, tile_rows)
    output = output_tile * tile_outputs + tl.arange(0, tile_outputs)
    at = tl.arange(0, tile_inputs)
    left = x + row.to(tl.int64)[:, None] * stride_x
    right = weight + output.to(tl.int64)[None, :] * stride_weight
    found = tl.zeros((tile_rows, tile_outputs), tl.float32)
    for first in range(0, inputs, tile_inputs):
        inside = first + at < inputs
        a = tl.load(
            left + (first + at)[None, :], mask=(row < rows)[:, None] & inside[None, :], other=0.0
        )
        b = tl.load(
            right + (first + at)[:, None],
            mask=(output < outputs)[None, :] & inside[:, None],
            other=0.0,
        )
        if widen:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        found = tl.dot(a, b, found, input_precision="ieee")
    if biased:
        found += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * outputs + output[None, :]
    inside = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(target, found.to(out.dtype.element_ty), mask=inside)


def fixed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias``: [rows, outputs], as ``dtype`` (None: the type of x), summed
    in fp32 in a fixed order.

    ``x`` [rows, inputs] and ``weight`` [outputs, inputs] have the same float type; ``bias``
    [outputs] has any. Raises ValueError if shapes or types do not fit.
    """
    out = torch.empty((len(x), len(weight)), dtype=dtype or x.dtype, device=x.device)
    fixed_linear_launch(out, x, weight, bias).run()
    return out


def fixed_linear_launch(
    out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> Launch:
    """Describe the kernel launch that computes ``fixed_linear`` into ``out``."""
    rows, inputs = x.shape
    outputs = len(weight)
    if weight.shape != (outputs, inputs) or weight.dtype != x.dtype:
        raise ValueError(f"the weight must be {x.dtype} [outputs, {inputs}]")
    if bias is not None and (bias.shape != (outputs,) or not bias.is_contiguous()):
        raise ValueError(f"the bias must be contiguous, [{outputs}]")
    check_strides(x, "x")
    check_strides(weight, "the weight")
    tile = fixed_tile(outputs, x.element_size())
    return Launch(
        fixed_linear_kernel,
        (-(-rows // tile.rows) * -(-outputs // tile.outputs),),
        {
            "x": x,
            "weight": weight,
            "bias": bias,
            "out": out,
            "rows": rows,
            "outputs": outputs,
            "inputs": inputs,
            "stride_x": x.stride(0),
            "stride_weight": weight.stride(0),
        },
        {
            "tile_rows": tile.rows,
            "tile_outputs": tile.outputs,
            "tile_inputs": tile.inputs,
            "band": _BAND,
            "biased": bias is not None,
            "widen": interpreted(fixed_linear_kernel),
        },
        warps=4,
        stages=4,
    )
