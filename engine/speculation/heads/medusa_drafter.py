"""Medusa heads guess the tokens behind the last one, all at once: chains, no trees.

They look at what the model's last layer made of the token that the last one was drawn from
(engine/speculation/heads/medusa_model.py), and keep nothing else: no KV, and after a handoff
nothing but one step without a draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from engine.sampling.sampling import SampleRow, draw_of
from engine.scheduling.plan import PlanRow
from engine.speculation.heads.draft_draws import DraftDraws
from engine.speculation.heads.medusa_model import MedusaModel
from engine.speculation.model_drafter import ComputedRow, DraftQuery
from engine.step.step import CoreShare

_MAX_DECODED = 16
"""A row of more tokens is a prompt's: a draft is shorter (``MAX_DRAFT_TOKENS``)."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What the last layer made of a sequence's token, the one before its last."""

    position: int
    hidden: torch.Tensor
    """fp32 [hidden_size]."""


class MedusaDrafter:
    """Implements ``engine.speculation.model_drafter.ModelDrafter``. Owned by the engine thread."""

    name = "medusa"

    def __init__(
        self,
        model: MedusaModel,
        layers: int,
        vocab_size: int,
        sampler: Callable[[torch.Tensor, list[SampleRow]], list[int]],
    ) -> None:
        """``layers`` and ``vocab_size`` are the model's that the heads are for."""
        self._model = model
        self._layers = (layers,)
        self._draws = DraftDraws(model.token_ids, vocab_size, sampler)
        self._seen: dict[int, _Seen] = {}
        self._prompts = False

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """See ``ModelDrafter``. None of a step with prompts: there the last layer's output, which

        is wanted of each prompt's last token alone, would be computed of all.
        """
        return () if self._prompts else self._layers

    @property
    def max_tokens(self) -> int:
        """See ``ModelDrafter``."""
        return self._model.heads

    def backlog(self, query: DraftQuery) -> int | None:
        """See ``ModelDrafter``: there is none."""
        seen = self._seen.get(query.row.sequence_id)
        return 0 if seen is not None and seen.position == query.row.start - 1 else None

    def catch_up(self, query: DraftQuery, most: int) -> None:
        """See ``ModelDrafter``: there is no backlog."""

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """See ``ModelDrafter``."""
        hidden = torch.stack([self._seen[query.row.sequence_id].hidden for query in queries])
        most = max(query.most for query in queries)
        drafts: list[list[int]] = [[] for _ in queries]
        for logits in self._model.logits(hidden, most):
            draws = [
                draw_of(query.known, [*query.known.token_ids, *draft])
                for query, draft in zip(queries, drafts, strict=True)
            ]
            for draft, token in zip(drafts, self._draws.draw(logits, draws), strict=True):
                draft.append(token)
        return [draft[: query.most] for draft, query in zip(drafts, queries, strict=True)]

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """See ``ModelDrafter``."""
        self._prompts = any(not row.sample or row.count > _MAX_DECODED for row in rows)

    def computed(
        self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None, *, prompts: bool
    ) -> int:
        """See ``ModelDrafter``: nothing is taken in."""
        for found in rows:
            row = found.row
            if hidden is None or not row.sample:
                self._seen.pop(row.sequence_id, None)
                continue
            last = found.right - 1
            state = hidden[found.first + last, 0].clone()
            self._seen[row.sequence_id] = _Seen(row.start + last, state)
        return 0

    def forget(self, sequence_id: int) -> None:
        """See ``ModelDrafter``."""
        self._seen.pop(sequence_id, None)

    def use_threads(self, threads: int) -> None:
        """Torch computes the heads, with the threads that it has."""

    def share_cores(self, share: CoreShare) -> None:
        """Torch computes the heads, and knows of no other engine."""
