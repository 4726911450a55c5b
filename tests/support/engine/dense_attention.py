"""The definition of attention, with which ``engine.model.attention.attend`` is compared."""

from __future__ import annotations

import math

import torch


def attend_dense(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    start: int,
    *,
    scale: float | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> torch.Tensor:
    """The definition: queries [count, heads, dim] at positions ``start …`` over keys and values
    [start + count, kv_heads, dim], in fp32. ``scale``, ``window`` and ``softcap`` are those of
    ``attend``. Returns [count, heads * dim].
    """
    count, heads, dim = queries.shape
    group = heads // keys.shape[1]
    key = keys.float().repeat_interleave(group, dim=1)
    value = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", queries.float(), key)
    scores = scores * dim**-0.5 if scale is None else scores * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    behind = torch.arange(start, start + count)[:, None] - torch.arange(key.shape[0])
    unseen = (behind < 0) | (behind >= window) if window else behind < 0
    weights = scores.masked_fill(unseen.to(scores.device), -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value).reshape(count, heads * dim)
