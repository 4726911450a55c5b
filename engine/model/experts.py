"""A mixture of experts (Shazeer et al., 2017), computed expert by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.families import Activation
from engine.checkpoint.model_config import ExpertsConfig
from engine.model.linear import Linear
from engine.model.mlp import GatedMlp, gated_mlp


@dataclass(frozen=True, slots=True)
class Experts:
    """A router, and the MLPs among which it chooses for each token."""

    router: Linear
    experts: tuple[GatedMlp, ...]
    first: int = 0
    """The number of the first: a rank of several has a run of them."""


def route(
    router: Linear, x: torch.Tensor, config: ExpertsConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's experts: weights fp32 and numbers int64, both [tokens, per_token]."""
    probabilities = router.to_float(x).softmax(dim=-1)
    weights, chosen = probabilities.topk(config.per_token, dim=-1)
    if config.normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights, chosen


def mix_experts(
    experts: Experts, x: torch.Tensor, config: ExpertsConfig, activation: Activation
) -> torch.Tensor:
    """fp32 [tokens, hidden_size] of ``x`` [tokens, hidden_size], of the weights' type.

    Tokens are sorted by expert, so that each expert that has any runs once over all of them. A
    token's results are added in the order of its own choice, whatever else is in the batch. Of
    experts that are not here the results are zeros.
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
