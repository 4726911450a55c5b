"""Speculation with a drafter that has its own model: how much to draft is chosen before.

Steps with prompts draft nothing: such steps are bound by arithmetic, and so is drafting during
them. Owned by the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from engine.cpu.library import CoreShare
from engine.scheduling.plan import PlanRow, RunnerSequence
from engine.speculation.model.length import EVIDENCE, PIECE, Candidate, ModelDraftLength
from engine.speculation.model_drafter import ComputedRow, DraftQuery, ModelDrafter
from engine.speculation.speculation import with_draft


class ModelSpeculation:
    """Implements ``engine.speculation.speculation.StepSpeculation``."""

    watches = True

    def __init__(self, model: ModelDrafter, length: ModelDraftLength | None = None) -> None:
        """``length`` chooses how much each sequence drafts; None: by measured costs."""
        self.model = model
        self.length = length or ModelDraftLength()
        self._drafting_s = 0.0
        """Seconds that the drafter has used in the current step, before and after the model."""

    @property
    def drafter(self) -> str:
        return self.model.name

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.model.hidden_layers

    def extend(self, rows: Sequence[PlanRow], known: Mapping[int, RunnerSequence]) -> list[PlanRow]:
        """See ``StepSpeculation``."""
        began = time.perf_counter()
        found = list(rows)
        if self.length.looks(len(rows)):
            drafts = self._drafts(rows, known)
            for place, row in enumerate(rows):
                if draft := drafts.get(row.sequence_id):
                    found[place] = with_draft(row, draft)
        self.model.begin(found)
        self._drafting_s = time.perf_counter() - began
        return found

    def _drafts(
        self, rows: Sequence[PlanRow], known: Mapping[int, RunnerSequence]
    ) -> dict[int, list[int]]:
        """The drafts that pay, by their sequences' ids."""
        if any(row.count > 1 or not row.sample for row in rows):
            return {}
        queries, candidates = [], []
        for row in rows:
            found = known[row.sequence_id]
            most = min(self.model.max_tokens, row.limit - len(found.token_ids) - 1)
            if not row.limit or most < 1:
                continue
            query = DraftQuery(row, found, most)
            backlog = self.model.backlog(query)
            if backlog is not None:
                queries.append(query)
                candidates.append(Candidate(row.sequence_id, most, backlog))
        if not queries:
            return {}
        lengths = self.length.wanted(len(rows), candidates)
        asked = [
            (replace(query, most=length), candidate.backlog)
            for query, candidate, length in zip(queries, candidates, lengths, strict=True)
            if length
        ]
        return self._proposed(asked)

    def _proposed(self, asked: Sequence[tuple[DraftQuery, int]]) -> dict[int, list[int]]:
        """Draft for queries, each with its backlog.

        A step processes at most one piece of the backlogs; sequences with more left draft later.
        """
        ready, tokens, room = [], 0, PIECE
        for query, backlog in asked:
            if backlog <= max(1, room):
                ready.append(query)
                tokens += backlog
                room -= backlog
            elif room > 0:
                began = time.perf_counter()
                self.model.catch_up(query, room)
                self.length.time.observe_tokens(room, time.perf_counter() - began)
                room = 0
        if not ready:
            return {}
        began = time.perf_counter()
        drafts = self.model.propose(ready)
        seconds = time.perf_counter() - began
        if tokens <= len(ready):
            # One missing token each, as after a draft that was all right, counts as no backlog.
            self.length.time.observe(len(ready), max(query.most for query in ready), seconds)
        return {query.row.sequence_id: draft for query, draft in zip(ready, drafts, strict=True)}

    def takes_prompt(self) -> bool:
        """See ``StepSpeculation``."""
        return self.length.takes_prompt()

    def verified(self, sequence_id: int, drafted: int, kept: int) -> None:
        """See ``StepSpeculation``."""
        if drafted:
            self.length.verified(sequence_id, EVIDENCE, drafted, kept)

    def computed(self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None) -> None:
        """See ``StepSpeculation``."""
        began = time.perf_counter()
        chunks = (found for found in rows if found.row.count > 1 and not found.drafted)
        prompts = any(found.known.takes_prompt for found in chunks)
        tokens = self.model.computed(rows, hidden, prompts=prompts)
        seconds = time.perf_counter() - began
        self._drafting_s += seconds
        if tokens:
            self.length.time.observe_tokens(tokens, seconds)

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """See ``StepSpeculation``. The drafter's time is not counted as part of the step."""
        self.length.observe(batch, drafted, seconds - self._drafting_s)

    def forget(self, sequence_id: int) -> None:
        """See ``StepSpeculation``."""
        self.model.forget(sequence_id)
        self.length.forget(sequence_id)

    def use_threads(self, threads: int) -> None:
        """See ``StepSpeculation``."""
        self.model.use_threads(threads)

    def share_cores(self, share: CoreShare) -> None:
        """See ``StepSpeculation``."""
        self.model.share_cores(share)
