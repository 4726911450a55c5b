"""Mixtures of experts on a GPU."""

from __future__ import annotations

import torch

from engine.checkpoint.families import Activation
from engine.checkpoint.model_config import ExpertsConfig
from engine.gpu.fused_weights import FusedMlp, SeparateExperts, StackedExperts
from engine.gpu.kernels.activation import gated
from engine.gpu.kernels.linear.grouped import add_choices, grouped_linear, route, route_held
from engine.model.experts import route as choose


def fused_mlp(mlp: FusedMlp, x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[rows, hidden] of ``x`` [rows, hidden], and of its type."""
    return mlp.down(_gated(mlp.gate_up(x), activation))


def _gated(both: torch.Tensor, activation: Activation) -> torch.Tensor:
    gate, up = both.chunk(2, dim=1)
    return gated(gate, up, activation)


def mix_stacked(
    experts: StackedExperts, x: torch.Tensor, config: ExpertsConfig, activation: Activation
) -> torch.Tensor:
    """fp32 [rows, hidden] of ``x`` [rows, hidden], without waiting for the GPU."""
    factors, chosen = choose(experts.router, x, config)
    first, count = experts.first, len(experts.gate_up)
    routing = (
        route(chosen, count)
        if count == config.count
        else route_held(chosen, range(first, first + count))
    )
    both = grouped_linear(x, experts.gate_up, routing, gathers=True)
    rows = grouped_linear(_gated(both, activation), experts.down, routing, gathers=False)
    return add_choices(rows, routing, factors)


def mix_separate(
    experts: SeparateExperts, x: torch.Tensor, config: ExpertsConfig, activation: Activation
) -> torch.Tensor:
    """fp32 [rows, hidden] of ``x`` [rows, hidden]; the host waits to know who was chosen.

    Tokens are sorted by expert, so that each that has any runs once over all of them; a token's
    results are added in the order of its own choice.
    """
    probabilities = experts.router(x).float().softmax(dim=-1)
    factors, chosen = probabilities.topk(config.per_token, dim=-1)
    if config.normalised:
        factors = factors / factors.sum(dim=-1, keepdim=True)
    held = range(experts.first, experts.first + len(experts.experts))
    routing = route_held(chosen, held)
    rows = x[routing.order.long() // config.per_token]
    counts = routing.offsets.diff().tolist()
    others = len(rows) - sum(counts)
    parts = torch.split(rows, [*counts, others])
    found = [
        fused_mlp(expert, part, activation)
        for expert, part in zip(experts.experts, parts[:-1], strict=True)
        if len(part)
    ]
    return add_choices(torch.cat([*found, parts[-1]]), routing, factors)
