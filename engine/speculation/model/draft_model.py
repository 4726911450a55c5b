"""Drafts tokens with a smaller model that has the same tokenizer.

This is speculative decoding (Leviathan et al., 2023; Chen et al., 2023) with one difference: a
drafted token is kept if the model draws the same token. Both models draw with the same noise of the
position. So the likelier a token is for both, the more often both draw it. Both must have the same
tokens: see ``check_vocabulary``.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from baton.errors import ConfigError
from engine.checkpoint.model_config import ModelConfig
from engine.sampling.sampling import draw_of
from engine.sampling.step import StepInput, StepModel, StepWork
from engine.scheduling.plan import PlanRow
from engine.speculation.model_drafter import (
    CachedDrafter,
    ComputedRow,
    DraftQuery,
    FilledSlots,
    Sampler,
    part_of,
)
from engine.speculation.speculation import MAX_DRAFT_TOKENS

_GAP = 2 * MAX_DRAFT_TOKENS
"""Maximum number of missing tokens before a chunk that the draft model processes together with the
chunk."""


class DraftModel(CachedDrafter):
    """Drafts tokens with a draft model. Implements ``ModelDrafter``. Owned by the engine thread.

    It may process prompts while they are computed. It processes other tokens only when it drafts.
    Drafts ignore grammars; the target does not accept a token that the grammar forbids.
    """

    name = "draft"
    hidden_layers: tuple[int, ...] = ()
    max_tokens = MAX_DRAFT_TOKENS

    def __init__(
        self, model: StepModel, filled: FilledSlots, context_length: int, sampler: Sampler
    ) -> None:
        """``model`` computes over the cache's group ``drafter``; ``filled`` records which slots of
        the group have KV.

        The group can hold ``context_length`` tokens of a sequence.
        """
        super().__init__(model, filled)
        self._context_length = context_length
        self._sampler = sampler

    def backlog(self, query: DraftQuery) -> int | None:
        """Number of tokens that the draft model must process before it can draft for a sequence;
        None if it cannot draft."""
        last = query.row.start
        if last + query.most >= self._context_length:
            return None
        return last - self._filled.count(query.row, last)

    def catch_up(self, query: DraftQuery, most: int) -> None:
        """Process up to ``most`` tokens that the draft model has not processed yet."""
        row = query.row
        start = self._filled.count(row, row.start)
        count = min(most, row.start - start)
        self._take_in([(part_of(row, start, count), query.known.token_ids)])

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Draft tokens for each query. Each step of the draft model covers all sequences that still
        draft."""
        drafts: list[list[int]] = [[] for _ in queries]
        for length in range(max(query.most for query in queries)):
            work = StepWork()
            rows, drawing = [], []
            for query, draft in zip(queries, drafts, strict=True):
                if query.most <= length:
                    continue
                row, tokens = query.row, query.known.token_ids
                if draft:
                    rows.append(part_of(row, row.start + length, 1))
                    work.token_ids.append(draft[-1])
                else:
                    start = self._filled.count(row, row.start)
                    rows.append(part_of(row, start, row.start + 1 - start))
                    work.token_ids += tokens[start : row.start + 1]
                work.draw([draw_of(query.known, [*tokens, *draft] if draft else tokens)])
                drawing.append(draft)
            for draft, token in zip(drawing, self._drawn(rows, work), strict=True):
                draft.append(token)
            if not length:
                for row in rows:
                    # The model may still overwrite the last one's slot: see ``begin``.
                    self._filled.fill(row, row.start, row.start + row.count - 1)
        return drafts

    def _drawn(self, rows: Sequence[PlanRow], work: StepWork) -> list[int]:
        greedy = all(draw.sampling.greedy and not draw.adjusted for draw in work.draws)
        found = self._steps.run(StepInput(tuple(rows), work.token_ids, work.outputs, greedy))
        if found.best is not None:
            return work.draw_best(found.best)
        assert found.logits is not None, "a step returns tokens or logits"
        return self._sampler(work.draw_logits(found.logits), work.draws)

    def computed(
        self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None, *, prompts: bool
    ) -> int:
        """Process a step that the target has computed. Returns the number of tokens that the
        drafter has processed in this call.

        The draft model has not computed the KV of a draft's last token, because it only sampled
        that token.
        """
        chunks = []
        for found in rows:
            row = found.row
            if found.drafted:
                end = row.start + min(found.right, found.drafted)
                self._filled.fill(row, row.start, end)
            elif prompts and row.count > 1 and (chunk := self._to_take_in(row)) is not None:
                chunks.append((chunk, found.known.token_ids))
        if chunks:
            self._take_in(chunks)
        return sum(row.count for row, _ in chunks)

    def _to_take_in(self, row: PlanRow) -> PlanRow | None:
        """Extend a chunk of a prompt by the few tokens before it whose KV the draft model lacks.
        Returns None if these are too many, or if there is no room for them.

        Without these tokens, the chunk would attend to keys that are not there. Some tokens are
        missing if the prompt contains an earlier answer.
        """
        end = row.start + row.count
        start = self._filled.count(row, row.start)
        if row.start - start > _GAP or end > self._context_length:
            return None
        return part_of(row, start, end - start)

    def _take_in(self, parts: Sequence[tuple[PlanRow, list[int]]]) -> None:
        """Compute rows in the draft model only to store their KV; each row comes with all tokens of
        its sequence."""
        token_ids: list[int] = []
        for row, tokens in parts:
            token_ids += tokens[row.start : row.start + row.count]
        self._steps.run(StepInput(tuple(row for row, _ in parts), token_ids, [], True))
        for row, _ in parts:
            self._filled.fill(row, row.start, row.start + row.count)


def check_vocabulary(
    folder: Path, config: ModelConfig, draft_folder: Path, draft_config: ModelConfig
) -> None:
    """Raise ConfigError, with both folders, if a token id has different texts in the two models.

    Only the ids matter: the draft model never splits text into tokens or applies templates.
    """
    sizes = config.vocab_size, draft_config.vocab_size
    if sizes[0] != sizes[1]:
        raise ConfigError(
            f"{draft_folder} cannot draft for {folder}: it has {sizes[1]} token ids, and the model"
            f" has {sizes[0]}; use a draft_model with the same tokenizer"
        )
    known, drafted = _tokens(folder), _tokens(draft_folder)
    if known == drafted:
        return
    other = next(id_ for id_ in sorted(known | drafted) if known.get(id_) != drafted.get(id_))
    raise ConfigError(
        f"{draft_folder} cannot draft for {folder}: token {other} is {drafted.get(other)!r}, and"
        f" the model has {known.get(other)!r}; use a draft_model with the same tokenizer"
    )


def _tokens(folder: Path) -> dict[int, str]:
    """Read the texts of a tokenizer.json's tokens, by token id. Raises ConfigError."""
    path = folder / "tokenizer.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocab = content["model"]["vocab"]
        # A unigram model has a list of texts and scores.
        pairs = (
            vocab.items() if isinstance(vocab, dict) else ((t[0], n) for n, t in enumerate(vocab))
        )
        found = {int(id_): str(text) for text, id_ in pairs}
        added = content.get("added_tokens") or []
        return found | {int(token["id"]): str(token["content"]) for token in added}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
