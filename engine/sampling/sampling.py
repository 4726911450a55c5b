"""Draws the next token: a pure function of the logits row, the parameters and the token ids.

Order: repetition, presence and frequency penalties, logit bias, min_tokens and bad words, allowed
tokens, the mask of the grammar or of bounded reasoning. Then temperature, top_k, top_p, min_p, and
the Gumbel-max draw (Maddison et al., 2014) with hashed noise.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from baton.sampling_params import SamplingParams
from engine.sampling.grammar_state import Mask, unpack
from engine.sampling.noise import gumbel, noise_keys
from engine.scheduling.plan import RunnerSequence


@dataclass(frozen=True, slots=True)
class SampleRow:
    """All inputs of one draw except its logits. ``token_ids`` are the tokens of prompt and
    output."""

    sampling: SamplingParams
    token_ids: list[int]
    prompt_length: int
    stop_ids: tuple[int, ...]
    choice: int = 0
    mask: Mask | None = None
    """Tokens that the sequence's grammar or bounded reasoning allows. None if it has neither, or if
    the mask is added later. A grammar's mask also excludes tokens that may not be drawn before
    ``min_tokens``."""
    bound: bool = False
    """Whether the draw needs a mask. The mask may be added later."""

    @property
    def plain(self) -> bool:
        """Whether the draw uses the model's logits unchanged: no penalties, biases or masks."""
        return not (self.adjusted or self.bound) and self.sampling.grammar is None

    @property
    def adjusted(self) -> bool:
        """Whether penalties, biases or other options change the logits, apart from a grammar's
        mask."""
        s = self.sampling
        penalised = s.presence_penalty or s.frequency_penalty or s.repetition_penalty != 1.0
        limited = s.allowed_token_ids or s.bad_words
        return bool(penalised or s.logit_bias or limited or self.held_back)

    @property
    def held_back(self) -> tuple[int, ...]:
        """Stop tokens that may not be drawn because ``min_tokens`` is not reached. Empty with a
        grammar, whose mask excludes them."""
        output = len(self.token_ids) - self.prompt_length
        has_grammar = self.sampling.grammar is not None
        return () if has_grammar or output >= self.sampling.min_tokens else self.stop_ids

    @property
    def forbidden(self) -> tuple[int, ...]:
        """Tokens that may not be drawn here: those in ``held_back``, and the last token of each bad
        word whose other tokens are at the output's end.

        Empty if they are the only tokens that ``allowed_token_ids`` and the grammar's mask leave:
        one of them is then drawn.
        """
        ends = (word[-1] for word in self.sampling.bad_words if self._ends_with(word[:-1]))
        found = (*self.held_back, *ends)
        return found if found and self._leaves_some(found) else ()

    def _leaves_some(self, forbidden: tuple[int, ...]) -> bool:
        """Whether any token may still be drawn if ``forbidden`` may not."""
        allowed = self.sampling.allowed_token_ids
        if allowed and self.mask is None:
            return not set(allowed).issubset(forbidden)
        if self.mask is None:
            return True
        left = self.mask.copy()
        for token in forbidden:
            left[token // 32] &= ~np.uint32(1 << (token % 32))
        return bool(left.any())

    def _ends_with(self, run: tuple[int, ...]) -> bool:
        begin = len(self.token_ids) - len(run)
        return begin >= self.prompt_length and tuple(self.token_ids[begin:]) == run


def draw_of(
    known: RunnerSequence, token_ids: list[int], choice: int | None = None, *, bound: bool = False
) -> SampleRow:
    """Make the draw of the token after ``token_ids``, for a sequence's own choice, or for
    ``choice``.

    ``bound``: true if a mask is added later.
    """
    number = known.choice if choice is None else choice
    return SampleRow(
        known.sampling, token_ids, known.prompt_length, known.stop_ids, number, bound=bound
    )


def sample(logits: torch.Tensor, rows: list[SampleRow]) -> list[int]:
    """Draw one token for each row of ``logits``, fp32 [rows, vocab_size]."""
    if all(row.plain and row.sampling.greedy for row in rows):
        return [int(token) for token in logits.argmax(dim=-1).tolist()]
    return [sample_one(logits[index], row) for index, row in enumerate(rows)]


def sample_one(logits: torch.Tensor, row: SampleRow) -> int:
    """Draw one token from one row of logits, fp32 [vocab_size]. The logits do not change."""
    if not row.plain:
        logits = _adjust(logits.clone(), row)
    if row.sampling.greedy:
        return int(logits.argmax())
    scores, token_ids = _keep(logits / row.sampling.temperature, row.sampling)
    keys = noise_keys(row.sampling.seed, row.choice, len(row.token_ids))
    return int(token_ids[(scores.double() + gumbel(keys, token_ids)).argmax()])


def _adjust(logits: torch.Tensor, row: SampleRow) -> torch.Tensor:
    sampling = row.sampling
    outputs = row.token_ids[row.prompt_length :]
    if sampling.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.token_ids)), device=logits.device)
        found = logits[seen]
        penalty = sampling.repetition_penalty
        logits[seen] = torch.where(found > 0, found / penalty, found * penalty)
    if outputs and (sampling.presence_penalty or sampling.frequency_penalty):
        counted = Counter(outputs)
        ids = torch.tensor(list(counted), device=logits.device)
        counts = torch.tensor(list(counted.values()), device=logits.device)
        logits[ids] -= sampling.presence_penalty + sampling.frequency_penalty * counts
    if sampling.logit_bias:
        ids = torch.tensor([token for token, _ in sampling.logit_bias], device=logits.device)
        bias = torch.tensor([value for _, value in sampling.logit_bias], device=logits.device)
        logits[ids] += bias
    if forbidden := row.forbidden:
        logits[list(forbidden)] = -torch.inf
    if sampling.allowed_token_ids:
        allowed = torch.tensor(sampling.allowed_token_ids, device=logits.device)
        others = torch.ones_like(logits, dtype=torch.bool)
        others[allowed] = False
        logits.masked_fill_(others, -torch.inf)
    if row.mask is not None:
        masked = torch.from_numpy(~unpack(row.mask, len(logits)))
        logits.masked_fill_(masked.to(logits.device), -torch.inf)
    return logits


def _keep(scores: torch.Tensor, sampling: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores of the tokens that top_k, top_p and min_p leave, and the ids of these
    tokens."""
    limited = 0 < sampling.top_k < scores.shape[0]
    token_ids = torch.arange(scores.shape[0], device=scores.device)
    if limited:
        # ``~(<)`` instead of ``>=``: NaN logits must leave something to draw.
        token_ids = token_ids[~(scores < scores.topk(sampling.top_k).values[-1])]
        scores = scores[token_ids]
    if limited or sampling.top_p < 1.0:
        # A stable sort: on equal scores the lower id comes first, as in a greedy draw.
        scores, order = scores.sort(descending=True, stable=True)
        token_ids = token_ids[order]
    if limited:
        scores, token_ids = scores[: sampling.top_k], token_ids[: sampling.top_k]
    if sampling.top_p < 1.0:
        probabilities = scores.softmax(dim=-1)
        before = probabilities.cumsum(dim=-1) - probabilities
        kept = max(1, int((before < sampling.top_p).sum()))
        scores, token_ids = scores[:kept], token_ids[:kept]
    if sampling.min_p > 0.0:
        near = ~(scores < scores.max() + torch.log(torch.tensor(sampling.min_p)))
        scores, token_ids = scores[near], token_ids[near]
    return scores, token_ids
