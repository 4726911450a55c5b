"""Weights in the order in which the C++ reads them: panels of 32 outputs, pairs of inputs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.quantization.weight import QuantizedWeight, unpack_nibbles

PANEL = 32
"""Outputs of a panel; PANEL in linear.h."""
LAYOUT_VERSION = 3
"""Raised whenever the same weight is packed, or quantised, in another way."""


def pack_panels(values: torch.Tensor) -> torch.Tensor:
    """[out, in], ``in`` even → [panels, in / 2, 32, 2], zeros behind the last output."""
    outputs, inputs = values.shape
    padded = F.pad(values, (0, 0, 0, -outputs % PANEL))
    panels = padded.view(-1, PANEL, inputs // 2, 2)
    return panels.transpose(1, 2).contiguous()


def pack_codes(weight: QuantizedWeight) -> torch.Tensor:
    """uint8 [panels, in / 2, 64], or [panels, in / 2, 32] for ``int4``: see quantized.h."""
    if weight.kind != "int4":
        return pack_panels(weight.codes).flatten(2)
    codes = pack_panels(unpack_nibbles(weight.codes)).flatten(2)
    return codes[..., :32] | (codes[..., 32:] << 4)


def pack_factors(factors: torch.Tensor) -> torch.Tensor:
    """Scales or minimums [out, groups] → [panels, groups, 32]."""
    outputs, groups = factors.shape
    padded = F.pad(factors, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, groups).transpose(1, 2).contiguous()


def packed_parts(
    name: str, weight: torch.Tensor | QuantizedWeight
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parts of a weight by name, as ``PackedCache`` takes them."""
    if isinstance(weight, torch.Tensor):
        yield f"{name}.data", pack_panels(weight.to(torch.bfloat16))
        return
    yield f"{name}.data", pack_codes(weight)
    yield f"{name}.scales", pack_factors(weight.scales)
    if weight.mins is not None:
        yield f"{name}.mins", pack_factors(weight.mins)
    if weight.columns is not None:
        yield f"{name}.columns", weight.columns
