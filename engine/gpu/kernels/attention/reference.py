"""What paged attention computes, in plain torch: the definition that both GPU kernels follow."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.gpu.kernels.kv_blocks import KvBlocks, dequantise


@dataclass(frozen=True, slots=True)
class Scoring:
    """How scores are made of products.

    ``scale`` multiplies them. ``window`` is the number of keys that a query sees at most, its own
    token's included (0: all). ``soft_cap`` c > 0 turns a score s into c * tanh(s / c) (Gemma 2,
    2024).
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0

    def __post_init__(self) -> None:
        if self.window < 0 or self.soft_cap < 0:
            raise ValueError("window and soft_cap cannot be negative")


def attend_reference(
    queries: torch.Tensor, blocks: KvBlocks, layer: int, table: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """The last ``count`` tokens of one sequence attend to it: fp32 [count, heads, dim].

    ``queries`` [count, heads, dim]; ``table`` [tokens] is the sequence's slot mapping, int64
    (block * block_size + slot of each of its tokens).
    """
    count, heads, _ = queries.shape
    values = dequantise(blocks)[:, layer].transpose(2, 3)[table // blocks.block_size]
    picked = values.gather(
        2, (table % blocks.block_size).view(-1, 1, 1, 1, 1).expand(-1, 2, 1, *values.shape[3:])
    )[:, :, 0]
    key, value = (
        picked[:, which].repeat_interleave(heads // blocks.heads, dim=1) for which in (0, 1)
    )
    scores = torch.einsum("qhd,khd->hqk", queries.float(), key) * scoring.scale
    if scoring.soft_cap:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    tokens = len(table)
    position = torch.arange(tokens - count, tokens, device=queries.device)[:, None]
    other = torch.arange(tokens, device=queries.device)
    hidden = other > position
    if scoring.window:
        hidden |= other <= position - scoring.window
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def slot_mapping(table: list[int], tokens: int, block_size: int) -> torch.Tensor:
    """Where the first ``tokens`` tokens of a block table are: int64 [tokens]."""
    position = torch.arange(tokens)
    return torch.tensor(table)[position // block_size] * block_size + position % block_size
