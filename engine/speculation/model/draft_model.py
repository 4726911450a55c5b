"""A smaller model with the same tokenizer guesses what the model will say.

Speculative decoding (Leviathan et al., 2023; Chen et al., 2023), but a draft is kept for being what
the model draws: both draw with the same noise of the position, so that the likelier a token is to
both, the likelier both draw it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from engine.cpu.decoder import CpuDecoder
from engine.sampling.sampling import SampleRow, draw_of
from engine.sampling.step_work import StepWork
from engine.scheduling.plan import PlanRow
from engine.speculation.model.filled_slots import FilledSlots
from engine.speculation.model_drafter import ComputedRow, DraftQuery
from engine.speculation.speculation import MAX_DRAFT_TOKENS
from engine.step.step import CoreShare, StepInput, StepModel

_GAP = 2 * MAX_DRAFT_TOKENS
"""Most tokens before a chunk that are taken in with it."""
Sampler = Callable[[torch.Tensor, list[SampleRow]], list[int]]
"""As ``engine.sampling.sampling.sample``."""


class DraftModel:
    """Implements ``engine.speculation.model_drafter.ModelDrafter``. Owned by the engine thread.

    What it makes of prompts it may compute with them; of other tokens it is behind until it drafts.
    A grammar does not hold it back: what the grammar forbids is not kept.
    """

    name = "draft"
    hidden_layers: tuple[int, ...] = ()
    max_tokens = MAX_DRAFT_TOKENS

    def __init__(
        self, model: StepModel, filled: FilledSlots, context_length: int, sampler: Sampler
    ) -> None:
        """``model`` computes over the cache's group ``drafter``, of which ``filled`` tells.

        It can hold ``context_length`` tokens.
        """
        self._model = model
        self._filled = filled
        self._context_length = context_length
        self._sampler = sampler
        self._done: dict[int, int] = {}
        """Of each sequence: so many of its tokens are known to be filled."""

    def backlog(self, query: DraftQuery) -> int | None:
        """See ``ModelDrafter``."""
        last = query.row.start
        if last + query.most >= self._context_length:
            return None
        return last - self._filled_of(query.row, last)

    def catch_up(self, query: DraftQuery, most: int) -> None:
        """See ``ModelDrafter``."""
        row = query.row
        start = self._filled_of(row, row.start)
        count = min(most, row.start - start)
        self._take_in([(_part(row, start, count), query.known.token_ids)])

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """See ``ModelDrafter``. Each step is one of all sequences that still draft."""
        drafts: list[list[int]] = [[] for _ in queries]
        for length in range(max(query.most for query in queries)):
            work = StepWork()
            rows, drawing = [], []
            for query, draft in zip(queries, drafts, strict=True):
                if query.most <= length:
                    continue
                row, tokens = query.row, query.known.token_ids
                if draft:
                    rows.append(_part(row, row.start + length, 1))
                    work.token_ids.append(draft[-1])
                else:
                    start = self._filled_of(row, row.start)
                    rows.append(_part(row, start, row.start + 1 - start))
                    work.token_ids += tokens[start : row.start + 1]
                work.draw([draw_of(query.known, [*tokens, *draft] if draft else tokens)])
                drawing.append(draft)
            for draft, token in zip(drawing, self._drawn(rows, work), strict=True):
                draft.append(token)
            if not length:
                for row in rows:
                    # The model may still overwrite the last one's slot: see ``begin``.
                    self._fill(row, row.start, row.start + row.count - 1)
        return drafts

    def _drawn(self, rows: Sequence[PlanRow], work: StepWork) -> list[int]:
        greedy = all(draw.sampling.greedy and not draw.adjusted for draw in work.draws)
        found = self._model.run(StepInput(tuple(rows), work.token_ids, work.outputs, greedy))
        if found.best is not None:
            return found.best
        assert found.logits is not None, "a step gives the one or the other"
        return self._sampler(found.logits, work.draws)

    def begin(self, rows: Sequence[PlanRow]) -> None:
        """See ``ModelDrafter``."""
        self._filled.spoil(rows)

    def computed(
        self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None, *, prompts: bool
    ) -> int:
        """See ``ModelDrafter``. A draft's last token was only drawn, and not computed."""
        chunks = []
        for found in rows:
            row = found.row
            if found.drafted:
                end = row.start + min(found.right, found.drafted)
                self._fill(row, row.start, end)
            elif prompts and row.count > 1 and (chunk := self._to_take_in(row)) is not None:
                chunks.append((chunk, found.known.token_ids))
        if chunks:
            self._take_in(chunks)
        return sum(row.count for row, _ in chunks)

    def _to_take_in(self, row: PlanRow) -> PlanRow | None:
        """A chunk with what is missing before it; None where that is too much, or it does not fit.

        Behind a gap it would be computed of keys that are not there. A few tokens are missing where
        an answer has ended that is a part of this prompt.
        """
        end = row.start + row.count
        start = self._filled_of(row, row.start)
        if row.start - start > _GAP or end > self._context_length:
            return None
        return _part(row, start, end - start)

    def _take_in(self, parts: Sequence[tuple[PlanRow, list[int]]]) -> None:
        """Compute rows' tokens; each row's sequence has the tokens beside it."""
        token_ids: list[int] = []
        for row, tokens in parts:
            token_ids += tokens[row.start : row.start + row.count]
        self._model.run(StepInput(tuple(row for row, _ in parts), token_ids, [], True))
        for row, _ in parts:
            self._fill(row, row.start, row.start + row.count)

    def _fill(self, row: PlanRow, start: int, end: int) -> None:
        self._filled.fill(row.block_table, start, end)
        self._done[row.sequence_id] = end

    def _filled_of(self, row: PlanRow, tokens: int) -> int:
        """How many of a sequence's first ``tokens`` tokens are taken in."""
        known = min(tokens, self._done.get(row.sequence_id, 0))
        found = self._filled.count(row.block_table, tokens, known)
        self._done[row.sequence_id] = found
        return found

    def forget(self, sequence_id: int) -> None:
        """See ``ModelDrafter``."""
        self._done.pop(sequence_id, None)

    def use_threads(self, threads: int) -> None:
        """See ``ModelDrafter``."""
        self._model.use_threads(threads)

    def share_cores(self, share: CoreShare) -> None:
        """See ``ModelDrafter``."""
        if isinstance(self._model, CpuDecoder):
            self._model.share_cores(share)


def _part(row: PlanRow, start: int, count: int) -> PlanRow:
    """Some tokens of a row's sequence."""
    return PlanRow(row.sequence_id, start, count, row.block_table, True)
