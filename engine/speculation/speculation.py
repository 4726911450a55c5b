"""Speculation in a step: how many draft tokens of each sequence are verified, and which are
accepted.

A drafter guesses the next tokens of a sequence, so that one step can check several of them. A draft
changes no answer: each of its tokens is kept only if the model draws the same token there.
``Speculation`` drafts by looking at a sequence's tokens; ``engine.speculation.model.speculation``
drafts with a model. The engine drafts instead of the scheduler, because only the engine has the
newest tokens while two plans are in flight. A plan bounds the length of a sequence; see
``PlanRow.limit``. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.cpu.library import CoreShare
from engine.scheduling.plan import PlanRow, RunnerSequence
from engine.speculation.length import MAX_IN_A_STEP, DraftLength, Proposal
from engine.speculation.model_drafter import ComputedRow


@dataclass(frozen=True, slots=True)
class Draft:
    """Draft tokens for a sequence, and the evidence that they are right."""

    token_ids: list[int]
    evidence: int
    """Evidence of the first draft token, 1 or more, on the drafter's own scale. Each later token
    has one more, since it counts only if those before it were right."""


class Drafter(Protocol):
    """Drafts tokens for one sequence at a time, from its tokens; it may keep state for each
    sequence."""

    @property
    def name(self) -> str:
        """Name of the drafter in the configuration and the metrics."""

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """Draft at most ``most`` tokens, a positive number, after ``token_ids``. Returns None if
        there is no draft.

        ``token_ids`` is the whole sequence, prompt and output. It begins with the tokens of the
        last call.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; an unknown one is ignored."""


_LONGEST = 15
"""Maximum length of a suffix that is compared, in tokens; a longer match adds no information."""
_CANDIDATES = 8
"""Maximum number of earlier occurrences of the last two tokens that are compared, the latest
first."""


class NgramDrafter:
    """Prompt lookup: finds an earlier occurrence of a sequence's latest tokens, and drafts what
    followed there.

    It searches prompt and output for the longest suffix that occurs earlier ("Inference with
    Reference", Yang et al., 2023; prompt lookup decoding, Saxena, 2023). It needs no model, and
    pays where text is copied, as in edits, quotes, answers from passages, and loops. The evidence
    is the length of the match in tokens.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """Draft the tokens that followed the longest match of the sequence's end; None if there is
        no match. The cost is proportional to the number of tokens since the last call."""
        index = self._indexes.get(sequence_id)
        if index is None:
            index = self._indexes[sequence_id] = _Index()
        index.extend(token_ids)
        end, length = index.longest_match(token_ids)
        if not length:
            return None
        return Draft(_continued(token_ids, end, most), length)

    def forget(self, sequence_id: int) -> None:
        self._indexes.pop(sequence_id, None)


class _Index:
    """Positions at which each token and each pair of tokens last occurred in a sequence. The
    sequence's last token is not included.

    It takes about 250 bytes per token.
    """

    __slots__ = ("_earlier", "_last_pair", "_last_token")

    def __init__(self) -> None:
        self._last_token: dict[int, int] = {}
        self._last_pair: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []
        """For each position, the earlier position at which the same pair of tokens ended; -1 if
        there is none."""

    def extend(self, token_ids: list[int]) -> None:
        """Add the sequence's new tokens to the index, except the last one."""
        last_token, last_pair, earlier = self._last_token, self._last_pair, self._earlier
        for position in range(len(earlier), len(token_ids) - 1):
            token = token_ids[position]
            last_token[token] = position
            if position:
                pair = token_ids[position - 1], token
                earlier.append(last_pair.get(pair, -1))
                last_pair[pair] = position
            else:
                earlier.append(-1)

    def longest_match(self, token_ids: list[int]) -> tuple[int, int]:
        """Find the longest earlier match of the sequence's end. Returns the position of the match's
        end, and its length. On a tie, the latest match is returned. The length is 0 if there is no
        match."""
        last = len(token_ids) - 1
        if last < 1:
            return 0, 0
        position = self._last_pair.get((token_ids[last - 1], token_ids[last]), -1)
        if position < 0:
            position = self._last_token.get(token_ids[last], -1)
            return position, int(position >= 0)
        best, longest = position, 0
        for _ in range(_CANDIDATES):
            length = _match_length(token_ids, position, last)
            if length > longest:
                best, longest = position, length
            position = self._earlier[position]
            if position < 0 or longest == _LONGEST:
                break
        return best, longest


def _match_length(token_ids: list[int], end: int, last: int) -> int:
    """Length of the common suffix of two parts of ``token_ids``, at most ``_LONGEST``. The parts
    end with the tokens at the indexes ``end`` and ``last``. Their last two tokens must be equal."""
    most = min(_LONGEST, end + 1)
    length = 2
    while length < most and token_ids[end - length] == token_ids[last - length]:
        length += 1
    return length


def _continued(token_ids: list[int], end: int, count: int) -> list[int]:
    """Return the ``count`` tokens that follow position ``end``. If the sequence has fewer tokens
    after ``end``, these tokens are repeated.

    So a repeated passage continues to be repeated, however short it is.
    """
    draft = token_ids[end + 1 : end + 1 + count]
    period = len(token_ids) - 1 - end
    while len(draft) < count:
        draft.append(draft[len(draft) - period])
    return draft


DRAFTERS = ("none", "ngram", "draft", "eagle", "medusa")
"""Names of speculative methods in the configuration."""
TOKEN_DRAFTERS = ("none", "ngram")
"""Names of the speculative methods that use only a sequence's tokens, and no model."""
MAX_DRAFT_TOKENS = 13
"""Maximum draft tokens of a sequence in a step. Together with the sequence's last token, these fit
one pass of the matrix product in linear.h."""

CostsOf = Callable[[int, int, int], list[float] | None]
"""Estimates the costs of steps with 0, 1, … draft tokens; see ``DraftLength.choose``. Arguments:
decoding sequences, tokens without drafts, maximum draft tokens. None means that no drafts should be
verified."""


class StepSpeculation(Protocol):
    """The runner's interface to speculation. Its methods are called at each step."""

    @property
    def drafter(self) -> str:
        """Name of the speculative method in the configuration."""

    @property
    def watches(self) -> bool:
        """Whether the runner must call ``computed`` after each step."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """The target's layers whose inputs ``computed`` needs, as in
        ``StepInput.hidden_layers``."""

    def extend(self, rows: Sequence[PlanRow], known: Mapping[int, RunnerSequence]) -> list[PlanRow]:
        """Add to the rows the drafts that are expected to pay; ``known`` has every row's sequence
        by id."""

    def takes_prompt(self) -> bool:
        """Whether the drafter should process the prompt of one more sequence while the target model
        computes that prompt."""

    def verified(self, sequence_id: int, drafted: int, kept: int) -> None:
        """Record that a step accepted the first ``kept`` of a sequence's ``drafted`` draft
        tokens."""

    def computed(
        self,
        rows: Sequence[ComputedRow],
        hidden: torch.Tensor | None,
    ) -> None:
        """Let the drafter process a step that the target has computed and whose tokens are
        sampled."""

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """Record the total duration of a step without prompts; ``batch`` is the number of sequences
        that decoded."""

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence that has ended."""

    def use_threads(self, threads: int) -> None:
        """Set the number of CPU threads of the drafter."""

    def share_cores(self, share: CoreShare) -> None:
        """Share the host's cores with other engines, if the drafter's model supports that."""


class Speculation:
    """Drafts with a ``Drafter``, which uses only a sequence's tokens. Implements
    ``StepSpeculation``."""

    watches = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, drafter: Drafter, length: DraftLength | None = None) -> None:
        """``length`` chooses how many tokens of each draft are verified. With None, the number is
        chosen from measured durations."""
        self._drafter = drafter
        self._length = length or DraftLength()
        self._drafts: dict[int, Draft] = {}

    @property
    def drafter(self) -> str:
        """Name of the speculative method in the configuration."""
        return self._drafter.name

    def extend(
        self,
        rows: Sequence[PlanRow],
        known: Mapping[int, RunnerSequence],
        costs_of: CostsOf | None = None,
    ) -> list[PlanRow]:
        """Add to the rows the drafts that are expected to pay. ``costs_of`` replaces the measured
        step durations."""
        self._drafts = {}
        for row in rows:
            if row.limit:
                token_ids = known[row.sequence_id].token_ids
                most = min(MAX_DRAFT_TOKENS, row.limit - len(token_ids) - 1)
                if most > 0:
                    self._propose(row.sequence_id, token_ids, most)
        if not self._drafts:
            return list(rows)
        proposals = [
            Proposal(sequence_id, draft.evidence, len(draft.token_ids))
            for sequence_id, draft in self._drafts.items()
        ]
        batch = sum(row.sample for row in rows)
        total = sum(row.count for row in rows)
        costs = None
        if costs_of is not None:
            most = min(MAX_IN_A_STEP, sum(proposal.tokens for proposal in proposals))
            costs = costs_of(batch, total, most)
            if costs is None:
                return list(rows)
        lengths = self._length.choose(batch, total, proposals, costs)
        chosen = dict(zip(self._drafts, lengths, strict=True))
        return [self._with_draft(row, chosen) for row in rows]

    def _propose(self, sequence_id: int, token_ids: list[int], most: int) -> None:
        draft = self._drafter.propose(sequence_id, token_ids, most)
        if draft is not None:
            self._drafts[sequence_id] = draft

    def _with_draft(self, row: PlanRow, chosen: dict[int, int]) -> PlanRow:
        count = chosen.get(row.sequence_id, 0)
        if not count:
            return row
        return with_draft(row, self._drafts[row.sequence_id].token_ids[:count])

    def verified(self, sequence_id: int, drafted: int, kept: int) -> None:
        """Record that a step accepted the first ``kept`` of a sequence's ``drafted`` draft
        tokens."""
        if drafted:
            evidence = self._drafts[sequence_id].evidence
            self._length.verified(sequence_id, evidence, drafted, kept)

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """Record the duration of a step. ``batch`` is the number of sequences that it decoded, and
        ``drafted`` is the number of draft tokens that it verified."""
        self._length.observe(batch, drafted, seconds)

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence that has ended."""
        self._drafter.forget(sequence_id)
        self._length.forget(sequence_id)

    def takes_prompt(self) -> bool:
        """Return False, because a drafter without a model processes no prompts."""
        return False

    def computed(self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None) -> None:
        """Do nothing. The runner does not call this method, because ``watches`` is false."""

    def use_threads(self, threads: int) -> None:
        """Do nothing: a drafter without a model uses no threads."""

    def share_cores(self, share: CoreShare) -> None:
        """Do nothing: a drafter without a model shares no cores."""


def make_speculation(name: str) -> Speculation | None:
    """Make the speculation for a method that uses only a sequence's tokens, by name; None for
    ``none``.

    Raises ValueError for another name.
    """
    drafter = make_drafter(name)
    return None if drafter is None else Speculation(drafter)


def make_drafter(name: str) -> Drafter | None:
    """Make the drafter for a method that uses only a sequence's tokens, by name; None for ``none``.

    Raises ValueError for another name.
    """
    if name not in TOKEN_DRAFTERS:
        raise ValueError(f"drafter {name!r} needs a model")
    return None if name == "none" else NgramDrafter()


def with_draft(row: PlanRow, draft: Sequence[int]) -> PlanRow:
    """Add a draft to a row that computes only a sequence's last token."""
    return replace(row, count=row.count + len(draft), draft=tuple(draft))


def kept_tokens(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Number of leading draft tokens that the target accepts: those equal to the tokens drawn in
    their positions."""
    kept = 0
    while kept < len(draft) and draft[kept] == drawn[kept]:
        kept += 1
    return kept
