"""A decoder's linear and feed-forward layers, in plain torch.

The feed-forward part is a gated MLP (Shazeer, GLU Variants Improve Transformer, 2020), or a mixture
of experts (Shazeer et al., 2017), which is computed expert by expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it

from engine.checkpoint.families import Activation
from engine.checkpoint.model_config import ExpertsConfig
from engine.quantization.weight import QuantizedWeight, dequantize


class Linear:
    """A linear layer, ``x @ weight.T + bias``, with weight [out, in] and x [rows, in]."""

    def __init__(
        self, weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None = None
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._dense = weight if isinstance(weight, torch.Tensor) else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to ``x``. Returns [rows, out] in the type of ``x``."""
        return F.linear(x, self._matrix(x.dtype), self.bias)

    def to_float(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to ``x``. Returns fp32 [rows, out]."""
        return self(x).float()

    def _matrix(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the weight as a plain matrix of ``dtype``. A quantized weight is dequantized once,
        at the first call."""
        if self._dense is None:
            assert isinstance(self.weight, QuantizedWeight)
            self._dense = dequantize(self.weight).to(dtype)
        return self._dense


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """Weights of a gated MLP, ``down(activation(gate(x)) * up(x))``."""

    gate: Linear
    up: Linear
    down: Linear


def gated_mlp(mlp: GatedMlp, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Compute a gated MLP: fp32 [rows, hidden_size] from ``x`` [rows, hidden_size] in the weights'
    type."""
    gate = mlp.gate(x)
    gate = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return mlp.down.to_float(gate * mlp.up(x))


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts of a mixture-of-experts layer, and the router that chooses a few experts for each
    token."""

    router: Linear
    experts: tuple[GatedMlp, ...]
    first: int = 0
    """Number of the first expert of this rank: with several ranks, each has a range of the
    experts."""


def route(
    router: Linear, x: torch.Tensor, config: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts. Returns their weights (fp32) and numbers (int64), both [tokens,
    per_token]."""
    probabilities = router.to_float(x).softmax(dim=-1)
    weights, chosen = probabilities.topk(config.per_token, dim=-1)
    if config.normalized:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def mix_experts(
    experts: Experts, x: torch.Tensor, config: ExpertsConfig, activation: Activation
) -> torch.Tensor:
    """Compute a mixture of experts: fp32 [tokens, hidden_size] from ``x`` [tokens, hidden_size] in
    the weights' type.

    Tokens are sorted by expert, so that each expert with tokens runs once. The results of a token's
    experts are added in the order in which the router chose them, so other tokens of the batch do
    not change the sum. Experts that are on other ranks contribute zeros.
    """
    weights, chosen = route(experts.router, x, config)
    order = chosen.flatten().argsort(stable=True)
    rows = x[order // config.per_token]
    counts = chosen.flatten().bincount(minlength=config.count).tolist()
    here = range(experts.first, experts.first + len(experts.experts))
    make = torch.empty if len(here) == config.count else torch.zeros
    found = make(rows.shape, dtype=torch.float32, device=x.device)
    end = sum(counts[: here.start])
    for expert, count in zip(experts.experts, counts[here.start : here.stop], strict=True):
        if count:
            span = slice(end, end + count)
            found[span] = gated_mlp(expert, rows[span], activation)
            end += count
    results = torch.empty_like(found)
    results[order] = found
    return (results.view(*chosen.shape, -1) * weights[..., None]).sum(dim=1)
