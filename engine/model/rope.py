"""Rotary position embedding (Su et al., RoFormer, 2021) and the scalings of its frequencies."""

from __future__ import annotations

import math

import torch

from engine.checkpoint.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeSpec,
    YarnScaling,
)


def rope_table(spec: RopeSpec, context: int, device: torch.device) -> torch.Tensor:
    """Make the table of cosines and sines of every position: fp32 [context, 2, rotary_dim / 2].

    The values are multiplied by the scaling's attention factor, if it has one, since that factor
    applies to queries and keys.
    """
    plain = _frequencies(spec.theta, spec.rotary_dim, device)
    frequencies, factor = _scaled(plain, spec, context)
    positions = torch.arange(context, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1) * factor


def _frequencies(theta: float, rotary_dim: int, device: torch.device) -> torch.Tensor:
    """Return the frequencies of the base ``theta``, fp32 [rotary_dim / 2]."""
    even = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device=device)
    return 1.0 / theta ** (even / rotary_dim)


def _scaled(frequencies: torch.Tensor, spec: RopeSpec, context: int) -> tuple[torch.Tensor, float]:
    """Apply the spec's scaling to the rotary frequencies. Returns the frequencies and the attention
    factor."""
    match spec.scaling:
        case None:
            return frequencies, 1.0
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case DynamicScaling(factor):
            # The base of a context that is `factor` times the original one.
            exponent = spec.rotary_dim / (spec.rotary_dim - 2)
            base = spec.theta * (factor * factor - factor + 1) ** exponent
            return _frequencies(base, spec.rotary_dim, frequencies.device), 1.0
        case Llama3Scaling() as scaling:
            return _llama3(frequencies, scaling), 1.0
        case LongRopeScaling() as scaling:
            long = context > scaling.original_context
            chosen = scaling.long_factors if long else scaling.short_factors
            return frequencies / frequencies.new_tensor(chosen), scaling.attention_factor
        case YarnScaling() as scaling:
            return _yarn(frequencies, spec, scaling), scaling.attention_factor


def _llama3(frequencies: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    low = scaling.original_context / scaling.low_freq_factor
    high = scaling.original_context / scaling.high_freq_factor
    blend = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
    stretched = torch.where(wavelengths > low, frequencies / scaling.factor, frequencies)
    between = (wavelengths <= low) & (wavelengths >= high)
    return torch.where(between, blended, stretched)


def _yarn(frequencies: torch.Tensor, spec: RopeSpec, scaling: YarnScaling) -> torch.Tensor:
    def dimension(turns: float) -> float:
        """Dimension whose frequency makes ``turns`` full turns within the original context."""
        ratio = scaling.original_context / (turns * 2 * math.pi)
        return spec.rotary_dim * math.log(ratio) / (2 * math.log(spec.theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_dim - 1)
    if low == high:
        # As in the paper's code: a step instead of a division by zero.
        high += 0.001
    index = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    stretch = ((index - low) / (high - low)).clamp(0, 1)
    return frequencies * (1 - stretch) + frequencies / scaling.factor * stretch


def apply_rope(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the first ``rotary_dim`` dimensions of ``x`` [tokens, heads, head_dim], in fp32.

    ``table`` [tokens, 2, rotary_dim / 2] has the rotation of each token's position.
    """
    rotary_dim = 2 * table.shape[-1]
    first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
    cos, sin = table[:, 0, None], table[:, 1, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)
