"""Drafts token by token with an EAGLE-3 head: chains, no trees.

A row of the head is a token and the feature of the token before it
(engine/speculation/heads/eagle_model.py). The keys and values of a token's row are in the token's
own slot. So a full block's contents depend only on the block's tokens and those before them, and
can be shared like the model's part. A row has zeros if there is no feature. That is the case for
the first token, and for a token whose predecessor was computed elsewhere or came from the prefix
cache. It is one row of many, and one step without a draft after a handoff.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from engine.sampling.sampling import SampleRow, draw_of
from engine.sampling.step import StepInput, StepModel
from engine.scheduling.plan import PlanRow
from engine.speculation.heads.eagle_model import EagleModel
from engine.speculation.model_drafter import (
    CachedDrafter,
    ComputedRow,
    DraftDraws,
    DraftQuery,
    FilledSlots,
    Sampler,
    part_of,
)
from engine.speculation.speculation import MAX_DRAFT_TOKENS

_MAX_WAITING = 16
"""Maximum number of a sequence's tokens whose head rows are computed only when the sequence drafts.
Computing this many rows costs little more than computing one."""
_MAX_MISSING = 16
"""Maximum number of head rows that may have zeros in place of features. With more, the head has too
little input, and does not draft."""
_OUTPUT = (1,)
"""Number of the head's output as an entry of ``StepInput.hidden_layers``: the head has one
layer."""


@dataclass(slots=True)
class _Waiting:
    """Inputs of the target's layers for the latest tokens of a sequence. The head has not computed
    its rows for these tokens yet."""

    start: int
    """Position of the first of these tokens in the sequence."""
    states: list[torch.Tensor] = field(default_factory=list)
    """Layer inputs in consecutive parts, each fp32 [tokens, feature_layers, hidden_size]."""

    @property
    def end(self) -> int:
        return self.start + sum(len(states) for states in self.states)

    def between(self, first: int, end: int) -> torch.Tensor:
        """Return the target's layer inputs for the tokens ``first`` … ``end - 1``."""
        states = self.states[0] if len(self.states) == 1 else torch.cat(self.states)
        return states[first - self.start : end - self.start]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of one sequence that the head computes in one of its steps."""

    row: PlanRow
    token_ids: list[int]


class EagleDrafter(CachedDrafter):
    """Drafts token by token with an EAGLE-3 head. Implements ``ModelDrafter``. Owned by the engine
    thread."""

    name = "eagle"
    max_tokens = MAX_DRAFT_TOKENS

    def __init__(
        self,
        model: EagleModel,
        steps: StepModel,
        filled: FilledSlots,
        sampler: Sampler,
    ) -> None:
        """``steps`` computes the head over the cache's group ``drafter``; ``filled`` records which
        slots of that group have KV."""
        super().__init__(steps, filled)
        self._model = model
        self._draws = DraftDraws(model.token_ids, model.config.vocab_size, sampler)
        self._shape = (len(model.feature_layers), model.target_hidden_size)
        self._waiting: dict[int, _Waiting] = {}

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs ``computed`` needs."""
        return self._model.feature_layers

    def backlog(self, query: DraftQuery) -> int | None:
        """Number of tokens that the head must process before it can draft for a sequence; None if
        it cannot draft."""
        last = query.row.start
        waiting = self._waiting.get(query.row.sequence_id)
        if waiting is None or waiting.end != last:
            return None
        filled = self._filled.count(query.row, last)
        return None if self._missing(query.row, filled) > _MAX_MISSING else last - filled

    def catch_up(self, query: DraftQuery, most: int) -> None:
        """Process up to ``most`` tokens that the head has not processed yet."""
        row = query.row
        start = self._filled.count(row, row.start)
        end = min(start + most, row.start)
        self._take_in([_part(row, query.known.token_ids, start, end)])

    def propose(self, queries: Sequence[DraftQuery]) -> list[list[int]]:
        """Draft tokens for each query. Each step of the head covers all sequences that still
        draft."""
        parts = []
        for query in queries:
            row, tokens = query.row, query.known.token_ids
            parts.append(_part(row, tokens, self._filled.count(row, row.start), row.start + 1))
        states: torch.Tensor | None = self._states(parts)
        features: torch.Tensor | None = None
        drafts: list[list[int]] = [[] for _ in queries]
        going = list(range(len(queries)))
        for length in range(1, max(query.most for query in queries) + 1):
            outputs = _last_places(parts)
            draws = [
                draw_of(queries[n].known, [*queries[n].known.token_ids, *drafts[n]]) for n in going
            ]
            greedy = self._draws.are_greedy(draws)
            step = _step(parts, outputs, greedy=greedy, states=states, features=features)
            tokens, features = self._drawn(step, draws)
            states = None
            for n, token in zip(going, tokens, strict=True):
                drafts[n].append(token)
            if length == 1:
                for part in parts:
                    # The model computes the last one next: see ``begin``.
                    self._fill(part.row, part.row.start, part.row.start + part.row.count - 1)
            on = [place for place, n in enumerate(going) if queries[n].most > length]
            going = [going[place] for place in on]
            if len(on) < len(features):
                features = features[on]
            parts = [
                _Part(part_of(queries[n].row, queries[n].row.start + length, 1), drafts[n][-1:])
                for n in going
            ]
        return drafts

    def _drawn(self, step: StepInput, draws: list[SampleRow]) -> tuple[list[int], torch.Tensor]:
        """Run a step of the head. Returns the token drawn after each part, and the feature of each
        part's last token."""
        found = self._steps.run(step)
        assert found.hidden is not None
        behind = found.hidden[:, 0]
        if step.outputs != list(range(len(behind))):
            behind = behind[step.outputs]
        if found.best is not None:
            return self._draws.named(found.best), behind
        assert found.logits is not None, "a step returns tokens or logits"
        return self._draws.draw(found.logits, draws), behind

    def computed(
        self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None, *, prompts: bool
    ) -> int:
        """Process a step that the target has computed. Returns the number of tokens that the
        drafter has processed in this call.

        Computed prompt tokens are always processed in this call. Their features are too large to be
        kept, and processing takes a fiftieth of the model's time. Answer tokens are processed when
        they fill a block, since the block may then be sent, or when many wait.
        """
        assert hidden is not None, "the model must return hidden states"
        parts = []
        for found in rows:
            row = found.row
            if found.drafted:
                # The draft computed the last token's row, including its feature.
                self._fill(row, row.start, row.start + 1)
            end = row.start + found.right
            self._keep(row, hidden[found.first : found.first + found.right])
            start = self._filled.count(row, end)
            if self._missing(row, start) > _MAX_MISSING:
                # The next row needs the state of the last token.
                self._forget_before(row.sequence_id, end - 1)
            elif start < end and self._is_due(found, end - start):
                parts.append(_part(row, found.known.token_ids, start, end))
        if parts:
            self._take_in(parts)
        return sum(part.row.count for part in parts if part.row.count > _MAX_WAITING)

    def _is_due(self, found: ComputedRow, waiting: int) -> bool:
        """Whether a sequence's ``waiting`` tokens have to be processed now, after the step of
        ``found``."""
        start, size = found.row.start, self._filled.block_size
        full = (start + found.right) // size > start // size
        return _is_chunk(found) or full or waiting > _MAX_WAITING

    def _missing(self, row: PlanRow, filled: int) -> int:
        """Number of tokens after the first ``filled`` ones for which the head has no feature."""
        return self._waiting[row.sequence_id].start - filled

    def _keep(self, row: PlanRow, states: torch.Tensor) -> None:
        waiting = self._waiting.get(row.sequence_id)
        if waiting is None or waiting.end != row.start:
            waiting = self._waiting[row.sequence_id] = _Waiting(row.start)
        # A copy, because only a part of a large step's tokens is kept.
        waiting.states.append(states.clone())

    def _take_in(self, parts: Sequence[_Part]) -> None:
        """Compute the parts' rows only in order to store their keys and values."""
        self._steps.run(_step(parts, [], greedy=True, states=self._states(parts)))
        for part in parts:
            end = part.row.start + part.row.count
            self._fill(part.row, part.row.start, end)
            self._forget_before(part.row.sequence_id, end - 1)

    def _states(self, parts: Iterable[_Part]) -> torch.Tensor:
        """Collect the target's layer inputs for all parts' rows: fp32 [tokens, feature_layers,
        hidden_size].

        Each row gets the layer inputs for the token before the row's own token. The head's C++ code
        makes the features. Torch's threads would busy-wait afterwards on the cores that the model
        needs next.
        """
        found = []
        for part in parts:
            start, end = part.row.start - 1, part.row.start + part.row.count - 1
            waiting = self._waiting.get(part.row.sequence_id)
            first = end if waiting is None else min(end, max(start, waiting.start))
            if first > start:
                found.append(torch.zeros(first - start, *self._shape))
            if waiting is not None and first < end:
                found.append(waiting.between(first, end))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _forget_before(self, sequence_id: int, position: int) -> None:
        """Drop a sequence's stored layer inputs of tokens before ``position``, because the head's
        rows that use these inputs have been computed."""
        waiting = self._waiting.get(sequence_id)
        if waiting is not None and waiting.start < position:
            kept = waiting.between(position, waiting.end).clone()
            self._waiting[sequence_id] = _Waiting(position, [kept])

    def _fill(self, row: PlanRow, start: int, end: int) -> None:
        self._filled.fill(row, start, end)
        self._forget_before(row.sequence_id, end - 1)

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; an unknown one is ignored."""
        super().forget(sequence_id)
        self._waiting.pop(sequence_id, None)


def _is_chunk(found: ComputedRow) -> bool:
    """Whether a computed row was a chunk of a prompt."""
    return found.row.count > 1 and not found.drafted


def _step(
    parts: Sequence[_Part],
    outputs: list[int],
    *,
    greedy: bool,
    states: torch.Tensor | None,
    features: torch.Tensor | None = None,
) -> StepInput:
    token_ids = [token for part in parts for token in part.token_ids]
    rows = tuple(part.row for part in parts)
    states = None if states is None else states.contiguous()
    features = None if features is None else features.contiguous()
    hidden = _OUTPUT if outputs else ()
    return StepInput(rows, token_ids, outputs, greedy, hidden, features, states)


def _part(row: PlanRow, tokens: Sequence[int], start: int, end: int) -> _Part:
    return _Part(part_of(row, start, end - start), list(tokens[start:end]))


def _last_places(parts: Iterable[_Part]) -> list[int]:
    """For each part, the index of its last token among the tokens of the head's step."""
    places, end = [], 0
    for part in parts:
        end += part.row.count
        places.append(end - 1)
    return places
