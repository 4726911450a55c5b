"""Speculation with a drafter that has its own model: the length of drafts is chosen before
drafting.

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
    """Drafts with a ``ModelDrafter``, for all sequences of a step at once. Implements
    ``engine.speculation.speculation.StepSpeculation``."""

    watches = True

    def __init__(self, model: ModelDrafter, length: ModelDraftLength | None = None) -> None:
        """``length`` chooses how many tokens each sequence drafts. With None, the number is chosen
        from measured durations."""
        self.model = model
        self.length = length or ModelDraftLength()
        self._drafting_s = 0.0
        """Seconds that the drafter has used in the current step, before and after the target's
        computation."""

    @property
    def drafter(self) -> str:
        return self.model.name

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        return self.model.hidden_layers

    def extend(self, rows: Sequence[PlanRow], known: Mapping[int, RunnerSequence]) -> list[PlanRow]:
        """Add drafts to the rows whose sequences draft in this step; ``known`` has every row's
        sequence by id."""
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
        """Draft for the sequences for which drafts are expected to pay. Returns the drafts by
        sequence id."""
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
        """Draft tokens for the queries in ``asked``, each paired with its backlog in tokens.
        Returns the drafts by sequence id.

        A step processes at most ``PIECE`` backlog tokens; a sequence with more left drafts in a
        later step.
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
        """Whether the drafter should process the prompt of one more sequence while the target model
        computes that prompt."""
        return self.length.takes_prompt()

    def verified(self, sequence_id: int, drafted: int, kept: int) -> None:
        """Record that a step accepted the first ``kept`` of a sequence's ``drafted`` draft
        tokens."""
        if drafted:
            self.length.verified(sequence_id, EVIDENCE, drafted, kept)

    def computed(self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None) -> None:
        """Let the drafter process a step that the target has computed and whose tokens are
        sampled."""
        began = time.perf_counter()
        chunks = (found for found in rows if found.row.count > 1 and not found.drafted)
        prompts = any(found.known.takes_prompt for found in chunks)
        tokens = self.model.computed(rows, hidden, prompts=prompts)
        seconds = time.perf_counter() - began
        self._drafting_s += seconds
        if tokens:
            self.length.time.observe_tokens(tokens, seconds)

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step without prompts, minus the drafter's time; ``batch`` is the
        number of sequences that decoded."""
        self.length.observe(batch, drafted, seconds - self._drafting_s)

    def forget(self, sequence_id: int) -> None:
        """Drop the drafter's state of a sequence that has ended."""
        self.model.forget(sequence_id)
        self.length.forget(sequence_id)

    def use_threads(self, threads: int) -> None:
        """Set the number of CPU threads of the drafter."""
        self.model.use_threads(threads)

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines, if the drafter's model supports that."""
        self.model.share_cores(share)
