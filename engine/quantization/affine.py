"""Integer codes with scales and zero points, as GPTQ, AWQ and compressed-tensors keep them."""

from __future__ import annotations

import torch

from engine.quantization.weight import QuantizedWeight, pack_nibbles, unpack_nibbles


def unpack_words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """int32 [rows, words] → uint8 [rows, words * 32 / bits]: the lowest bits come first.

    ``bits`` is 4 or 8. What four bytes of a word hold, lies in their order on every machine that
    torch runs on.
    """
    codes = packed.contiguous().view(torch.uint8)
    return unpack_nibbles(codes) if bits == 4 else codes


def affine_weight(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: torch.Tensor | None = None,
) -> QuantizedWeight:
    """The weight ``(code - zero) * scale``.

    ``codes``: uint8 [out, in] of 0..2^bits-1, where ``bits`` is 4 or 8. ``scales``: floating
    [out, number of groups]. ``zeros``: integers of the same shape; None: 2^(bits-1) everywhere.
    ``groups``: integers [in], each input's group, where they do not simply follow one another.
    Raises ValueError where the shapes do not fit.
    """
    inputs, number = codes.shape[1], scales.shape[1]
    if inputs % number:
        raise ValueError(f"{number} groups do not divide {inputs} inputs")
    codes, columns = _sorted(codes, groups, inputs // number)
    full = scales.float()
    middle = 1 << (bits - 1)
    offsets = torch.zeros_like(full) if zeros is None else full * (middle - zeros.float())
    if bits == 4:
        # Codes are unsigned, so that the middle is part of the minimum.
        scales, mins = narrowed(full, offsets - full * middle)
        return QuantizedWeight(pack_nibbles(codes), "int4", scales, mins, inputs // number, columns)
    signed = codes ^ 128
    if not offsets.any():
        (scales,) = narrowed(full)
        return QuantizedWeight(signed, "int8", scales, None, inputs // number, columns)
    scales, mins = narrowed(full, offsets)
    return QuantizedWeight(signed, "int8", scales, mins, inputs // number, columns)


def _sorted(
    codes: torch.Tensor, groups: torch.Tensor | None, group: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Codes with each group's inputs side by side, and the inputs in that order."""
    if groups is None:
        return codes, None
    plain = torch.arange(codes.shape[1], device=codes.device) // group
    if groups.shape != plain.shape:
        raise ValueError(f"{groups.numel()} group numbers for {plain.numel()} inputs")
    if torch.equal(groups.long(), plain):
        return codes, None
    columns = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[columns], plain):
        raise ValueError("its groups are not of equal size")
    return codes[:, columns], columns


def narrowed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All in fp16 where that loses nothing of any, else in fp32. The result is contiguous."""
    halves = tuple(tensor.half().contiguous() for tensor in tensors)
    full = tuple(tensor.float().contiguous() for tensor in tensors)
    exact = all(torch.equal(half.float(), one) for half, one in zip(halves, full, strict=True))
    return halves if exact else full
