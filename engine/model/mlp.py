"""The gated MLP (Shazeer, GLU Variants Improve Transformer, 2020)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.checkpoint.families import Activation
from engine.model.linear import Linear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """``down(activation(gate(x)) * up(x))``."""

    gate: Linear
    up: Linear
    down: Linear


def gated_mlp(mlp: GatedMlp, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """fp32 [rows, hidden_size] of ``x`` [rows, hidden_size], which is of the weights' type."""
    gate = mlp.gate(x)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return mlp.down.to_float(gate * mlp.up(x))
