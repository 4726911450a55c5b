"""Log probabilities of tokens from the raw logits: log-softmax, in plain torch.

This is the definition; the CPU has its own implementation (``engine.cpu.sampler``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from baton.logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scored:
    """A token whose log probability is wanted, and the row of logits that gives it."""

    row: int
    """Row of the step's logits from which the log probability is computed."""
    token_id: int
    top: int
    """Number of most likely tokens to report in addition to this token."""


Scorer = Callable[[torch.Tensor, Sequence[Scored]], list[TokenLogprobs]]
"""Computes log probabilities of ``Scored`` tokens from logits, fp32 [rows, vocab_size]. It does not
change the logits."""


def token_logprobs(logits: torch.Tensor, wanted: Sequence[Scored]) -> list[TokenLogprobs]:
    """Compute log probabilities in plain torch, on any device. Implements ``Scorer``.

    Equally likely tokens are ordered by id. If ``top`` leaves out some of several equally likely
    tokens, it is undefined which of these tokens are reported.
    """
    if not wanted:
        return []
    rows = torch.tensor([each.row for each in wanted], device=logits.device)
    tokens = torch.tensor([each.token_id for each in wanted], device=logits.device)
    most = min(max(each.top for each in wanted), logits.shape[1])
    taken = logits[rows]
    whole = taken.logsumexp(dim=-1, keepdim=True)
    own = (taken.gather(1, tokens[:, None]) - whole)[:, 0].tolist()
    top = taken.topk(most, dim=-1)
    ids, values = top.indices.tolist(), (top.values - whole).tolist()
    return [
        TokenLogprobs(own[n], _ordered(ids[n][: each.top], values[n][: each.top]))
        for n, each in enumerate(wanted)
    ]


def _ordered(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    pairs = zip(ids, values, strict=True)
    return tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
