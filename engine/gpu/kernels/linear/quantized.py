"""Linear layers with int8, int4 or fp8 weights for small batches: the codes of the weights are read
once.

A weight is ``code * scale + min`` per group of inputs. Codes are converted to the activations'
type, which is exact. Each group's products are summed and then scaled in fp32. The inputs are cut
into splits that depend only on the weight's shape, and a second kernel adds the splits in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.kv_blocks import FP8_BITS, INT8, as_number
from engine.gpu.kernels.launch import (
    Launch,
    capability_of,
    check_strides,
    interpreted,
    power_of_two,
)

Kind = Literal["int8", "int4", "fp8"]

MAX_ROWS = 64
"""Maximum rows of ``quantized_linear``. For more rows, the product is limited by arithmetic, so a
plain product with dequantized weights is faster than this kernel."""

_FP8 = 2
_INT4 = 4
_KINDS = {"int8": INT8, "fp8": FP8_BITS, "int4": _INT4}
_HARDWARE_FP8 = 89

_LEAST = 16
_MAX_UNITS = 4
"""Maximum number of units (consecutive inputs that share a scale) that a program multiplies at a
time. Larger batches use fewer units, because their sums take more registers."""
_PROGRAMS = 264
"""Target number of programs: two for each multiprocessor of an H200. It is constant, so that the
inputs are split in the same way on every GPU."""
_MAX_SPLITS = 8
_NARROW = 64
"""Number of outputs that a program computes, which is that of one matrix instruction. For larger
batches, a program computes twice as many, so that activations are read half as often."""


@dataclass(frozen=True, slots=True)
class GpuWeight:
    """A quantized weight in the layout of the kernel.

    ``codes`` is uint8 [units, outputs, bytes]. A unit consists of ``unit`` consecutive inputs that
    share a scale. Codes that are read together are adjacent. In int4 the low halves of a unit's
    bytes are its first inputs, and the high halves are the rest. ``scales`` is fp32 [groups,
    outputs]; ``mins`` has the same form, or is None.
    """

    kind: Kind
    codes: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None
    inputs: int
    group: int
    unit: int

    @property
    def outputs(self) -> int:
        return self.codes.shape[1]


def gpu_weight(
    kind: Kind, codes: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor | None
) -> GpuWeight:
    """Make a kernel's weight from the usual form of a quantized weight.

    ``codes`` is uint8 [outputs, inputs] (int8: signed; fp8: e4m3fn), or [outputs, inputs / 2] for
    int4, 0 … 15, with the even input in the low half. ``scales`` is [outputs, groups]; ``mins`` has
    the same form, or is None. A group is 16, a multiple of 32, or a whole row. Raises ValueError
    for other sizes.
    """
    outputs, groups = scales.shape
    if kind == "int4":
        codes = torch.stack((codes & 15, codes >> 4), dim=2).flatten(1)
    inputs = codes.shape[1]
    whole = groups > 0 and inputs % groups == 0
    if codes.dtype != torch.uint8 or codes.shape[0] != outputs or not whole:
        raise ValueError("codes must be uint8 with a row for each row of scales, in whole groups")
    group = inputs // groups
    if groups > 1 and group != 16 and group % 32:
        raise ValueError(f"groups of {group} inputs are not supported: 16, or a multiple of 32")
    if kind == "int4" and group == 16:
        # Half a group is too short for a matrix product, so each code becomes a byte.
        kind = "int8"
    unit = 128 if groups == 1 else next(size for size in (128, 64, 32, 16) if group % size == 0)
    padding = -inputs % unit
    units = torch.nn.functional.pad(codes, (0, padding)).view(outputs, -1, unit).transpose(0, 1)
    if kind == "int4":
        units = units[..., : unit // 2] | (units[..., unit // 2 :] << 4)
    return GpuWeight(
        kind,
        units.contiguous(),
        scales.float().t().contiguous(),
        None if mins is None else mins.float().t().contiguous(),
        inputs,
        group if groups > 1 else units.shape[0] * unit,
        unit,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _load_x(  # type: ignore[no-untyped-def]
    x,
    first,
    count: tl.constexpr,
    rows,
    tile_rows: tl.constexpr,
    stride,
    inputs,
    widen: tl.constexpr,
):
    """Load activations as a transposed tile [count, tile_rows], with zeros outside of ``x``."""
    at = first + tl.arange(0, count)
    row = tl.arange(0, tile_rows)
    inside = (at < inputs)[:, None] & (row < rows)[None, :]
    found = tl.load(x + row[None, :] * stride + at[:, None], mask=inside, other=0.0)
    if widen:
        found = found.to(tl.float32)
    return found


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def quantized_linear_kernel(  # type: ignore[no-untyped-def]
    x,
    codes,
    scales,
    mins,
    out,
    rows,
    outputs,
    inputs,
    stride_x,
    group: tl.constexpr,
    unit: tl.constexpr,
    units: tl.constexpr,
    step_units: tl.constexpr,
    split_units: tl.constexpr,
    tile: tl.constexpr,
    tile_rows: tl.constexpr,
    kind: tl.constexpr,
    has_mins: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute a tile of outputs over one split of the inputs. Stores fp32 sums [split, row,
    output]."""
    output = tl.program_id(0) * tile + tl.arange(0, tile)
    real = output < outputs
    bytes_of: tl.constexpr = unit // 2 if kind == 4 else unit
    half: tl.constexpr = unit // 2
    byte = tl.arange(0, bytes_of)
    begin = tl.program_id(1) * split_units
    end = tl.minimum(begin + split_units, units)
    found = tl.zeros((tile, tile_rows), tl.float32)
    for first in range(begin, end, step_units):
        for more in tl.static_range(step_units):
            number = first + more
            some = output < tl.where(number < end, outputs, 0)
            place = (number.to(tl.int64) * outputs + output)[:, None] * bytes_of + byte[None, :]
            code = tl.load(codes + place, mask=some[:, None], other=0.0)
            at = number * unit // group * outputs + output
            scale = tl.load(scales + at, mask=some, other=0.0)
            if kind == 4:
                left = _load_x(x, number * unit, half, rows, tile_rows, stride_x, inputs, widen)
                right = _load_x(
                    x, number * unit + half, half, rows, tile_rows, stride_x, inputs, widen
                )
                sums = tl.dot((code & 15).to(left.dtype), left, input_precision="ieee")
                sums = tl.dot((code >> 4).to(left.dtype), right, sums, input_precision="ieee")
                if has_mins:
                    whole = tl.sum(left.to(tl.float32), axis=0)
                    whole += tl.sum(right.to(tl.float32), axis=0)
            else:
                left = _load_x(x, number * unit, unit, rows, tile_rows, stride_x, inputs, widen)
                if kind == 1:
                    code = code.to(tl.int8, bitcast=True)
                sums = tl.dot(as_number(code, kind, left.dtype), left, input_precision="ieee")
                if has_mins:
                    whole = tl.sum(left.to(tl.float32), axis=0)
            found += sums * scale[:, None]
            if has_mins:
                low = tl.load(mins + at, mask=some, other=0.0)
                found += low[:, None] * whole[None, :]
    row = tl.arange(0, tile_rows)
    target = out + (tl.program_id(1) * rows + row)[None, :].to(tl.int64) * outputs + output[:, None]
    tl.store(target, found, mask=real[:, None] & (row < rows)[None, :])


@triton.jit(do_not_specialize=["rows"])  # type: ignore[untyped-decorator]
def add_splits_kernel(  # type: ignore[no-untyped-def]
    partial,
    bias,
    out,
    rows,
    outputs,
    splits: tl.constexpr,
    tile: tl.constexpr,
    biased: tl.constexpr,
):
    """Add the splits of a tile of one row's outputs, in order, and then the bias, if there is
    one."""
    row = tl.program_id(1).to(tl.int64)
    output = tl.program_id(0) * tile + tl.arange(0, tile)
    real = output < outputs
    found = tl.zeros((tile,), tl.float32)
    for split in range(splits):
        found += tl.load(partial + (split * rows + row) * outputs + output, mask=real, other=0.0)
    if biased:
        found += tl.load(bias + output, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + output, found.to(out.dtype.element_ty), mask=real)


def quantized_linear(
    x: torch.Tensor,
    weight: GpuWeight,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    *,
    tile_rows: int | None = None,
) -> torch.Tensor:
    """Compute ``x @ weight.T + bias`` with a quantized weight: [rows, outputs], as ``dtype`` (None:
    the type of x), summed in fp32.

    ``x`` is bf16, fp16 or fp32 [rows, inputs], at most 64 rows; ``bias`` [outputs] has any float
    type. The order of a row's sums depends only on the weight's shape. With a fixed ``tile_rows``
    (16, 32 or 64, at least the rows), the same instructions run for every batch, and a row's bits
    do not depend on the batch. Raises ValueError if shapes or types do not fit.
    """
    shape = (x.shape[0], weight.outputs)
    out = torch.empty(shape, dtype=dtype or x.dtype, device=x.device)
    for launch in quantized_linear_launches(out, x, weight, bias, tile_rows, capability_of(x)):
        launch.run()
    return out


def quantized_linear_launches(
    out: torch.Tensor,
    x: torch.Tensor,
    weight: GpuWeight,
    bias: torch.Tensor | None,
    tile_rows: int | None,
    capability: int,
) -> tuple[Launch, Launch]:
    """Describe the two kernel launches of ``quantized_linear``, for a GPU of compute capability
    ``capability``."""
    rows, inputs = x.shape
    tile_rows = tile_rows or max(_LEAST, power_of_two(rows))
    if rows > min(MAX_ROWS, tile_rows) or inputs != weight.inputs:
        raise ValueError(f"x must be at most [{min(MAX_ROWS, tile_rows)}, {weight.inputs}]")
    if bias is not None and (bias.shape != (weight.outputs,) or not bias.is_contiguous()):
        raise ValueError(f"the bias must be contiguous, [{weight.outputs}]")
    check_strides(x, "x")
    kind = _KINDS[weight.kind]
    codes = weight.codes
    if kind == FP8_BITS and capability >= _HARDWARE_FP8:
        kind, codes = _FP8, codes.view(torch.float8_e4m3fn)
    tile = _NARROW if tile_rows <= _LEAST else 2 * _NARROW
    split_units, splits = splitting(weight)
    step_bytes = 128 if tile_rows <= _LEAST else 64
    step_units = min(max(1, step_bytes // codes.shape[2]), _MAX_UNITS)
    partial = torch.empty((splits, rows, weight.outputs), dtype=torch.float32, device=x.device)
    first = Launch(
        quantized_linear_kernel,
        (-(-weight.outputs // tile), splits),
        {
            "x": x,
            "codes": codes,
            "scales": weight.scales,
            "mins": weight.mins,
            "out": partial,
            "rows": rows,
            "outputs": weight.outputs,
            "inputs": weight.inputs,
            "stride_x": x.stride(0),
        },
        {
            "group": weight.group,
            "unit": weight.unit,
            "units": weight.codes.shape[0],
            "step_units": step_units,
            "split_units": split_units,
            "tile": tile,
            "tile_rows": tile_rows,
            "kind": kind,
            "has_mins": weight.mins is not None,
            "widen": interpreted(quantized_linear_kernel),
        },
        warps=4 if tile_rows <= _LEAST else 8,
        stages=4 if tile_rows <= _LEAST else 3,
    )
    second = Launch(
        add_splits_kernel,
        (-(-weight.outputs // 1024), rows),
        {"partial": partial, "bias": bias, "out": out, "rows": rows, "outputs": weight.outputs},
        {"splits": splits, "tile": 1024, "biased": bias is not None},
    )
    return first, second


def splitting(weight: GpuWeight) -> tuple[int, int]:
    """Choose the number of units in a split, and the number of splits. They depend only on the
    weight's shape."""
    units = weight.codes.shape[0]
    steps = -(-units // _MAX_UNITS)
    wanted = -(-_PROGRAMS // -(-weight.outputs // _NARROW))
    split_steps = -(-steps // min(wanted, _MAX_SPLITS, steps))
    return split_steps * _MAX_UNITS, -(-steps // split_steps)


def dequantized(weight: GpuWeight) -> torch.Tensor:
    """Dequantize a weight in plain torch: fp32 [outputs, inputs]."""
    codes = weight.codes
    if weight.kind == "int4":
        numbers = torch.cat((codes & 15, codes >> 4), dim=2).float()
    elif weight.kind == "int8":
        numbers = codes.view(torch.int8).float()
    else:
        numbers = codes.view(torch.float8_e4m3fn).float()
    numbers = numbers.transpose(0, 1).flatten(1)[:, : weight.inputs]
    groups = torch.arange(weight.inputs, device=codes.device) // weight.group
    values = numbers * weight.scales.t()[:, groups]
    return values if weight.mins is None else values + weight.mins.t()[:, groups]


def quantized_linear_reference(
    x: torch.Tensor, weight: GpuWeight, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The reference for ``quantized_linear``, in plain torch: fp32 [rows, outputs]."""
    found = x.float() @ dequantized(weight).t()
    return found if bias is None else found + bias.float()
