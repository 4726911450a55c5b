"""A quantized weight matrix: the common form of all readers, packers and kernels.

``w[i, j] = code[i, j] * scale[i, j // group] + min[i, j // group]``
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

QuantKind = Literal["int8", "int4", "fp8"]
KINDS: tuple[QuantKind, ...] = ("int8", "int4", "fp8")
DEFAULT_GROUP = 32
"""Default number of inputs that share a scale, as in GGUF's Q4_0, Q4_1 and Q8_0."""

_FP8_MAX = 448.0
"""The largest finite value of float8_e4m3fn (OCP 8-bit Floating Point Specification 1.0)."""
_HALF_MAX = 65504.0
_MIN_GROUP = 16
_PIECE_VALUES = 1 << 20
"""Maximum number of values that are in fp32 at a time while a tensor is quantized, which bounds the
memory use."""
_SHRINKS = tuple(1.0 - 0.025 * step for step in range(13))
"""Fractions of a group's range that int4 quantization tries, from 1.0 to 0.7."""
_HALF_LOSS, _HALF_STEP = 2.0**-9, 2.0**-12
"""Maximum change of a scale by rounding to fp16 for which fp16 is used: relative to the scale
itself, or to the largest scale. Only scales that become subnormal or infinite change more."""


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedWeight:
    """A matrix [out, in] of ``codes``, with a scale and optionally a minimum per group of inputs.

    Raises ValueError if the tensors' shapes do not fit together.
    """

    codes: torch.Tensor
    """Codes, uint8 [out, in]. For ``int4``, they are [out, in / 2], with the even input in the low
    nibble."""
    kind: QuantKind
    """Meaning of a code. ``int8``: -128..127 in two's complement; ``int4``: 0..15; ``fp8``: the
    bits of e4m3fn."""
    scales: torch.Tensor
    """Scale of each group, fp32 or fp16 [out, in / group]."""
    mins: torch.Tensor | None
    """Minimum of each group, with the shape and type of the scales; None means 0. ``int8`` may have
    them, too: Q5_1, Q5_K, asymmetric GPTQ."""
    group: int
    """Number of inputs that share a scale; it divides the number of inputs."""
    columns: torch.Tensor | None = None
    """Order of the stored columns, int64 [in]: column j belongs to input ``columns[j]`` (GPTQ's
    act-order), so that a kernel uses ``x[:, columns]``. None means that columns are in the order of
    the inputs."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS or self.codes.dtype != torch.uint8 or self.codes.dim() != 2:
            raise ValueError(f"not {self.kind} codes: {self.codes.dtype} {self.codes.shape}")
        outputs, inputs = self.shape
        if self.group < 1 or inputs % self.group:
            raise ValueError(f"groups of {self.group} do not divide {inputs} inputs")
        expected = (outputs, inputs // self.group)
        for tensor in (self.scales, self.scales if self.mins is None else self.mins):
            if tensor.shape != expected or tensor.dtype != self.scales.dtype:
                raise ValueError(
                    f"scales or mins are {tensor.dtype} {tuple(tensor.shape)}, not {expected}"
                )
        if self.scales.dtype not in (torch.float32, torch.float16):
            raise ValueError(f"scales are {self.scales.dtype}, and must be fp32 or fp16")
        if self.columns is not None and self.columns.shape != (inputs,):
            raise ValueError(f"{tuple(self.columns.shape)} columns of {inputs}")

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the dequantized matrix: (out, in)."""
        outputs, width = self.codes.shape
        return outputs, width * 2 if self.kind == "int4" else width

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Number of bytes of codes, scales, minimums and column order together."""
        parts = (self.codes, self.scales, self.mins, self.columns)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, device: torch.device) -> QuantizedWeight:
        return replace(
            self,
            codes=self.codes.to(device),
            scales=self.scales.to(device),
            mins=None if self.mins is None else self.mins.to(device),
            columns=None if self.columns is None else self.columns.to(device),
        )

    def rows(self, chosen: torch.Tensor | slice) -> QuantizedWeight:
        """Select rows of the weight: by their numbers, int64 [n] (copied), or by a slice
        (views)."""
        return replace(
            self,
            codes=self.codes[chosen],
            scales=self.scales[chosen],
            mins=None if self.mins is None else self.mins[chosen],
        )

    def inputs(self, run: range) -> QuantizedWeight:
        """Select a range of consecutive inputs, that is, of the matrix's columns. The result is a
        view.

        Rows with only one scale may be cut anywhere, since a part of a row keeps the scale. Raises
        ValueError if ``run`` cuts a group or a byte of ``int4``, or if columns are not in the order
        of the inputs.
        """
        if self.columns is not None:
            raise ValueError("its columns are not in the order of its inputs")
        group, groups = self.group, slice(None)
        if group == self.shape[1]:
            group = len(run)
        else:
            groups = slice(run.start // group, run.stop // group)
            if run.start % group or run.stop % group:
                raise ValueError(
                    f"inputs {run.start} to {run.stop} are not whole groups of {group}"
                )
        codes = slice(run.start, run.stop)
        if self.kind == "int4":
            if run.start % 2 or run.stop % 2:
                raise ValueError(f"inputs {run.start} to {run.stop} cut a byte of two int4 codes")
            codes = slice(run.start // 2, run.stop // 2)
        return replace(
            self,
            codes=self.codes[:, codes],
            scales=self.scales[:, groups],
            mins=None if self.mins is None else self.mins[:, groups],
            group=group,
        )

    def clone(self) -> QuantizedWeight:
        """Copy the weight into its own, contiguous memory."""
        return replace(
            self,
            codes=self.codes.clone(memory_format=torch.contiguous_format),
            scales=self.scales.clone(memory_format=torch.contiguous_format),
            mins=None
            if self.mins is None
            else self.mins.clone(memory_format=torch.contiguous_format),
            columns=None if self.columns is None else self.columns.clone(),
        )


def _code_values(codes: torch.Tensor, kind: QuantKind) -> torch.Tensor:
    if kind == "int4":
        return unpack_nibbles(codes).float()
    if kind == "fp8":
        return codes.view(torch.float8_e4m3fn).float()
    return codes.view(torch.int8).float()


def dequantize(weight: QuantizedWeight, rows: torch.Tensor | None = None) -> torch.Tensor:
    """Dequantize a weight to fp32 [out, in], with the columns in the order of the inputs: the
    reference for every kernel.

    ``rows`` has the numbers of the rows to return, int64 [n], as for an embedding; None means all
    rows.
    """
    codes, scales, mins = weight.codes, weight.scales, weight.mins
    if rows is not None:
        codes, scales = codes[rows], scales[rows]
        mins = None if mins is None else mins[rows]
    values = _code_values(codes, weight.kind).view(len(codes), -1, weight.group)
    values = values * scales.float().unsqueeze(-1)
    if mins is not None:
        values = values + mins.float().unsqueeze(-1)
    values = values.view(len(codes), weight.shape[1])
    if weight.columns is None:
        return values
    ordered = torch.empty_like(values)
    ordered[:, weight.columns] = values
    return ordered


def fitting_group(inputs: int, wanted: int = DEFAULT_GROUP) -> int:
    """Choose a group size: the largest of ``wanted``, its half, … down to 16 that divides
    ``inputs``; else ``inputs``."""
    group = wanted
    while group >= _MIN_GROUP:
        if inputs % group == 0:
            return group
        group //= 2
    return inputs


def quantize(tensor: torch.Tensor, kind: QuantKind, group: int | None = None) -> QuantizedWeight:
    """Quantize a floating-point matrix [out, in], piece by piece.

    ``int8`` is symmetric about 0, with the group's largest magnitude at 127. ``int4`` has a scale
    and a minimum. ``fp8`` has the row's largest magnitude at 448, and uses whole rows as groups. If
    ``group`` is None, it is 32 if that divides the inputs. Raises ValueError if the group does not
    divide the inputs, or if ``int4`` gets an odd number of inputs.
    """
    outputs, inputs = tensor.shape
    if group is None:
        group = inputs if kind == "fp8" else fitting_group(inputs)
    if inputs % group or (kind == "fp8" and group != inputs) or (kind == "int4" and inputs % 2):
        raise ValueError(f"{kind} cannot have groups of {group} in rows of {inputs}")
    quantizer = {"int8": _int8, "int4": _int4, "fp8": _fp8}[kind]
    rows = max(1, _PIECE_VALUES // inputs)
    pieces = [
        quantizer(tensor[start : start + rows].float().view(-1, inputs // group, group))
        for start in range(0, outputs, rows)
    ]
    return concat_rows(pieces)


def _int8(groups: torch.Tensor) -> QuantizedWeight:
    """Quantize ``groups``, fp32 [rows, groups, group], to symmetric int8 codes with a scale for
    each group."""
    scales = groups.abs().amax(-1) / 127
    scales = scales.to(_scale_type(scales))
    codes = (groups * _inverse(scales.float()).unsqueeze(-1)).round_().clamp_(-127, 127)
    codes = codes.flatten(1).to(torch.int8).view(torch.uint8)
    return QuantizedWeight(codes, "int8", scales, None, groups.shape[-1])


def _fp8(groups: torch.Tensor) -> QuantizedWeight:
    scales = groups.abs().amax(-1) / _FP8_MAX
    values = (groups * _inverse(scales).unsqueeze(-1)).clamp_(-_FP8_MAX, _FP8_MAX)
    codes = values.flatten(1).to(torch.float8_e4m3fn).view(torch.uint8)
    return QuantizedWeight(codes, "fp8", scales, None, groups.shape[-1])


def _int4(groups: torch.Tensor) -> QuantizedWeight:
    """Quantize ``groups``, fp32 [rows, groups, group], to int4: try several ranges for each group,
    and keep the one with the smallest squared error.

    This is how AWQ chooses its clipping (Lin et al., 2023, arXiv:2306.00978, section 4). Scale and
    minimum are refitted to the codes by least squares, as in llama.cpp's ``make_qkx2_quants``.
    """
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    middle, reach = (low + high) / 2, (high - low) / 2
    dtype = _scale_type(reach / 7.5) if groups.abs().max() < _HALF_MAX else torch.float32
    best = torch.full_like(low, math.inf)
    best_scale, best_min = torch.zeros_like(low), low.clone()
    for shrink in _SHRINKS:
        scale, least = reach * (2 * shrink / 15), middle - reach * shrink
        scale, least = _least_squares(groups, _nibbles(groups, scale, least), scale, least)
        # The error is measured with the scale as stored.
        scale, least = scale.to(dtype).float(), least.to(dtype).float()
        error = _nibbles(groups, scale, least).mul_(scale).add_(least).sub_(groups)
        error = error.square_().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        best_scale = torch.where(better, scale, best_scale)
        best_min = torch.where(better, least, best_min)
    codes = _nibbles(groups, best_scale, best_min).flatten(1).to(torch.uint8)
    scales, mins = best_scale.squeeze(-1).to(dtype), best_min.squeeze(-1).to(dtype)
    return QuantizedWeight(pack_nibbles(codes), "int4", scales, mins, groups.shape[-1])


def _nibbles(groups: torch.Tensor, scale: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
    return ((groups - least) * _inverse(scale)).round_().clamp_(0, 15)


def _least_squares(
    groups: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, least: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each group, fit a straight line through the points (code, weight). Returns scales and
    minimums; a group whose codes are all equal keeps the given scale and minimum."""
    mean_code, mean = codes.mean(-1, keepdim=True), groups.mean(-1, keepdim=True)
    centred = codes - mean_code
    spread = centred.square().sum(-1, keepdim=True)
    slope = (centred * groups).sum(-1, keepdim=True) * _inverse(spread)
    fitted = (spread > 0) & (slope > 0)
    return (
        torch.where(fitted, slope, scale),
        torch.where(fitted, mean - slope * mean_code, least),
    )


def _inverse(values: torch.Tensor) -> torch.Tensor:
    """Compute 1 / x for each value, and 0 for 0."""
    return torch.where(values == 0, 0.0, 1 / values)


def _scale_type(scales: torch.Tensor) -> torch.dtype:
    """Choose the type of scales: fp16 if that is precise enough, else fp32.

    In groups of 32, fp32 scales and minimums would make a 4-bit weight a fifth larger.
    """
    room = torch.maximum(scales * _HALF_LOSS, scales.max() * _HALF_STEP)
    fine = (scales.half().float() - scales).abs() <= room
    return torch.float16 if bool(fine.all()) else torch.float32


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack 4-bit codes, uint8 [..., n] of 0..15, into [..., n / 2], the first of each pair in the
    low nibble."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Unpack bytes, uint8 [..., n], into 4-bit codes [..., 2 n] of 0..15, the low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def can_concat(weights: Sequence[QuantizedWeight]) -> bool:
    """Whether ``concat_rows`` accepts these weights: same kind, group, inputs and order of
    columns."""
    first = weights[0]
    return all(
        (weight.kind, weight.group, weight.shape[1]) == (first.kind, first.group, first.shape[1])
        and _same_order(weight.columns, first.columns)
        for weight in weights
    )


def _same_order(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def concat_rows(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Concatenate the rows of all weights into one weight, so that layers with the same input are
    computed as one.

    Scales become fp32 if any weight's are. Minimums of 0 are added if only some weights have
    minimums. Raises ValueError unless ``can_concat`` is true.
    """
    first = weights[0]
    if len(weights) == 1:
        return first
    if not can_concat(weights):
        found = ", ".join(f"{w.kind} {w.shape} in groups of {w.group}" for w in weights)
        raise ValueError(f"cannot join rows of different weights: {found}")
    halves = all(weight.scales.dtype == torch.float16 for weight in weights)
    dtype = torch.float16 if halves else torch.float32
    mins: torch.Tensor | None = None
    if any(weight.mins is not None for weight in weights):
        parts = (torch.zeros_like(w.scales) if w.mins is None else w.mins for w in weights)
        mins = torch.cat([part.to(dtype) for part in parts])
    return QuantizedWeight(
        codes=torch.cat([weight.codes for weight in weights]),
        kind=first.kind,
        scales=torch.cat([weight.scales.to(dtype) for weight in weights]),
        mins=mins,
        group=first.group,
        columns=first.columns,
    )
