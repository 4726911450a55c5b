"""Drafts in a step: which sequences check how many tokens, and what of them is kept.

A drafter guesses the next tokens of a sequence, so that one step can check several of them. A draft
changes no answer: each of its tokens is kept only while it is the very token that the model draws
there. ``Speculation`` drafts from the tokens, ``engine.speculation.model.speculation`` with a
model. The engine drafts, not the scheduler: while two plans are in flight it alone has the newest
tokens. A plan says how far a sequence may go; see ``PlanRow.limit``. Owned by the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from engine.cpu.library import CoreShare
from engine.scheduling.plan import KnownSequence, PlanRow
from engine.speculation.length import MAX_IN_A_STEP, DraftLength, Proposal
from engine.speculation.model_drafter import ComputedRow


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, and how much speaks for them."""

    token_ids: list[int]
    evidence: int
    """Of its first token, 1 or more, in the drafter's own measure; each token behind it has one
    more, since those before it were right when it counts."""


class Drafter(Protocol):
    """One for an engine; it may keep state for each sequence."""

    @property
    def name(self) -> str:
        """As the configuration and the metrics call it."""

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """At most ``most`` tokens, which is positive, behind ``token_ids``, or None.

        ``token_ids`` is the whole sequence, prompt and output; what was there at the last call is
        there unchanged.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; one that is not known is ignored."""


_LONGEST = 15
"""Tokens of a suffix that are compared: a longer match says nothing new."""
_CANDIDATES = 8
"""Earlier occurrences of the last two tokens that are compared, the latest first."""


class NgramDrafter:
    """Prompt lookup: what followed the last time the sequence ended as it ends now.

    The longest suffix that occurs earlier in the prompt or the output is continued as it was there
    ("Inference with Reference", Yang et al., 2023; prompt lookup decoding, Saxena, 2023). That
    costs no model: it pays where text is copied, as in edits, quotes, answers from passages, and
    loops. The evidence is the length of the match in tokens.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """See ``Drafter``. The cost is that of the tokens since the last call."""
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
    """Where the tokens and the pairs of tokens of a sequence last ended, but for its last token.

    About 250 bytes a token.
    """

    __slots__ = ("_earlier", "_last_pair", "_last_token")

    def __init__(self) -> None:
        self._last_token: dict[int, int] = {}
        self._last_pair: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []
        """For each position where the pair that ends there ended before; -1: nowhere."""

    def extend(self, token_ids: list[int]) -> None:
        """Take in all tokens but the last one."""
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
        """Where the longest match of the suffix ends, the latest of equals; its length, or 0."""
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
    """How many tokens up to ``end`` are those up to ``last``; the last two are known to be."""
    most = min(_LONGEST, end + 1)
    length = 2
    while length < most and token_ids[end - length] == token_ids[last - length]:
        length += 1
    return length


def _continued(token_ids: list[int], end: int, count: int) -> list[int]:
    """``count`` tokens as they follow ``end``; those behind the last one are of the draft itself.

    So a repeated passage goes on being repeated, however short it is.
    """
    draft = token_ids[end + 1 : end + 1 + count]
    period = len(token_ids) - 1 - end
    while len(draft) < count:
        draft.append(draft[len(draft) - period])
    return draft


DRAFTERS = ("none", "ngram", "draft", "eagle", "medusa")
"""By the names that the configuration takes."""
TOKEN_DRAFTERS = ("none", "ngram")
"""Those of them that look at tokens alone."""
MAX_DRAFT_TOKENS = 13
"""Of one sequence in one step: with its own token a pass of linear.h."""

CostsOf = Callable[[int, int, int], list[float] | None]
"""What steps with 0, 1, … drafted tokens take; see ``DraftLength.choose``. Asked with the sequences
that decode, the tokens without drafts, and the most drafted tokens. None: none is to be checked."""


class StepSpeculation(Protocol):
    """What the runner asks, step by step; see the module's text."""

    @property
    def drafter(self) -> str:
        """Its name."""

    @property
    def watches(self) -> bool:
        """Whether ``computed`` is to be called."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """What ``computed`` is to be given of the model; see ``StepInput.hidden_layers``."""

    def extend(self, rows: Sequence[PlanRow], known: Mapping[int, KnownSequence]) -> list[PlanRow]:
        """The rows with the drafts that pay; ``known`` has every row's sequence by its id."""

    def takes_prompt(self) -> bool:
        """Whether another sequence's prompt is to be taken in as it is computed."""

    def verified(self, sequence_id: int, drafted: int, kept: int) -> None:
        """Of the sequence's drafted tokens in the step that has ended the first were right."""

    def computed(
        self,
        rows: Sequence[ComputedRow],
        hidden: torch.Tensor | None,
    ) -> None:
        """A step has been computed, and its tokens are drawn; see ``ModelDrafter.computed``."""

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """A step in which ``batch`` sequences decoded, and nothing else, took so long in all."""

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's state."""

    def use_threads(self, threads: int) -> None:
        """See ``StepModel``."""

    def share_cores(self, share: CoreShare) -> None:
        """See ``ModelDrafter``."""


class Speculation:
    """Drafts by a ``Drafter``, which looks at tokens alone. Implements ``StepSpeculation``."""

    watches = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, drafter: Drafter, length: DraftLength | None = None) -> None:
        """``length`` says how much of each draft is checked; without it what is measured does."""
        self._drafter = drafter
        self._length = length or DraftLength()
        self._drafts: dict[int, Draft] = {}

    @property
    def drafter(self) -> str:
        """Its name."""
        return self._drafter.name

    def extend(
        self,
        rows: Sequence[PlanRow],
        known: Mapping[int, KnownSequence],
        costs_of: CostsOf | None = None,
    ) -> list[PlanRow]:
        """See ``StepSpeculation``. ``costs_of`` stands for what was observed."""
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
        """Of the sequence's drafted tokens in the step that has ended the first were right."""
        if drafted:
            evidence = self._drafts[sequence_id].evidence
            self._length.verified(sequence_id, evidence, drafted, kept)

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """See ``DraftLength.observe``."""
        self._length.observe(batch, drafted, seconds)

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's state."""
        self._drafter.forget(sequence_id)
        self._length.forget(sequence_id)

    def takes_prompt(self) -> bool:
        """There is nothing to take in."""
        return False

    def computed(self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None) -> None:
        """It is not called: there is nothing to watch."""

    def use_threads(self, threads: int) -> None:
        """What looks at tokens takes none."""

    def share_cores(self, share: CoreShare) -> None:
        """What looks at tokens takes none."""


def make_speculation(name: str) -> Speculation | None:
    """By the name of a drafter that looks at tokens alone; None for ``none``.

    Raises ValueError for another name.
    """
    drafter = make_drafter(name)
    return None if drafter is None else Speculation(drafter)


def make_drafter(name: str) -> Drafter | None:
    """As ``make_speculation``."""
    if name not in TOKEN_DRAFTERS:
        raise ValueError(f"drafter {name!r} is not one that looks at tokens alone")
    return None if name == "none" else NgramDrafter()


def with_draft(row: PlanRow, draft: Sequence[int]) -> PlanRow:
    """A row of a sequence's last token, with a draft behind it."""
    return replace(row, count=row.count + len(draft), draft=tuple(draft))


def kept_tokens(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """How many tokens of a draft are those drawn in their places."""
    kept = 0
    while kept < len(draft) and draft[kept] == drawn[kept]:
        kept += 1
    return kept
