"""Rotary position embedding (Su et al., RoFormer, 2021) with Llama 3's frequency scaling."""

from __future__ import annotations

import math

import torch

from engine.model_config import ModelConfig, RopeScaling


def rope_table(config: ModelConfig, device: torch.device) -> torch.Tensor:
    """Cosines and sines of every position: fp32 [context, 2, head_dim / 2]."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / config.rope_theta ** (half / config.head_dim)
    if config.rope_scaling is not None:
        frequencies = _scale(frequencies, config.rope_scaling)
    positions = torch.arange(config.context_length, dtype=torch.float32, device=device)
    angles = torch.outer(positions, frequencies)
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def _scale(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # Llama 3: long waves are stretched, short ones kept, those between blended.
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


def apply_rope(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate ``x`` [tokens, heads, head_dim] by ``table`` [tokens, 2, head_dim / 2], in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = table[:, 0, None], table[:, 1, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
