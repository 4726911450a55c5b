"""Drawing drafted tokens from the logits of a head that can guess some of the tokens only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.sampling.sampling import SampleRow


class DraftDraws:
    """Draws with the noise that the model will draw with (``engine.sampling.sampling``)."""

    def __init__(
        self,
        token_ids: torch.Tensor,
        vocab_size: int,
        sampler: Callable[[torch.Tensor, list[SampleRow]], list[int]],
    ) -> None:
        """``token_ids`` int64 [draft_vocab_size] are the model's ids of the head's outputs."""
        self._token_ids = token_ids
        self._names: list[int] = token_ids.tolist()
        self._vocab_size = vocab_size
        self._sampler = sampler

    @staticmethod
    def are_greedy(draws: Sequence[SampleRow]) -> bool:
        """Whether the likeliest tokens are those drawn."""
        return all(draw.sampling.greedy and not draw.adjusted for draw in draws)

    def named(self, outputs: Sequence[int]) -> list[int]:
        """The model's ids of the head's outputs."""
        return [self._names[output] for output in outputs]

    def draw(self, logits: torch.Tensor, draws: list[SampleRow]) -> list[int]:
        """One token for each row of ``logits``, fp32 [rows, draft_vocab_size].

        A grammar does not hold it back: what the grammar forbids is not kept.
        """
        if self.are_greedy(draws):
            return self.named(logits.argmax(dim=-1).tolist())
        whole = logits.new_full((len(draws), self._vocab_size), -torch.inf)
        whole[:, self._token_ids] = logits
        return self._sampler(whole, draws)
