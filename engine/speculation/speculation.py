"""Drafts in a step: how many tokens of each sequence are checked, and which are kept.

A drafter guesses the next tokens of a sequence, so that one step can check several of them. A draft
changes no answer: each of its tokens is kept only if the model draws the same token there.
``Speculation`` drafts from the tokens, ``engine.speculation.model.speculation`` with a model. The
engine drafts instead of the scheduler, because only the engine has the newest tokens while two
plans are in flight. A plan bounds the length of a sequence; see ``PlanRow.limit``. Owned by the
engine thread.
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
    """Tokens that may come next, and the evidence for them."""

    token_ids: list[int]
    evidence: int
    """Evidence of the first token, 1 or more, in the drafter's own measure. Each later token has
    one more, since it counts only if those before it were right."""


class Drafter(Protocol):
    """Drafts tokens for an engine; it may keep state for each sequence."""

    @property
    def name(self) -> str:
        """Name in the configuration and the metrics."""

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """Draft at most ``most`` tokens, a positive number, after ``token_ids``, or return None.

        ``token_ids`` is the whole sequence, prompt and output. It extends that of the last call.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; an unknown one is ignored."""


_LONGEST = 15
"""Maximum tokens of a suffix that are compared; a longer match adds no information."""
_CANDIDATES = 8
"""Maximum earlier occurrences of the last two tokens that are compared, the latest first."""


class NgramDrafter:
    """Prompt lookup: drafts what followed the last time the sequence ended in the same way.

    It finds the longest suffix that occurs earlier in the prompt or the output, and drafts what
    followed there ("Inference with Reference", Yang et al., 2023; prompt lookup decoding, Saxena,
    2023). It needs no model, and pays where text is copied, as in edits, quotes, answers from
    passages, and loops. The evidence is the length of the match in tokens.
    """

    name = "ngram"

    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """See ``Drafter``. The cost is proportional to the tokens since the last call."""
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
    """Where each token and pair of tokens of a sequence last ended, except at its last token.

    It takes about 250 bytes per token.
    """

    __slots__ = ("_earlier", "_last_pair", "_last_token")

    def __init__(self) -> None:
        self._last_token: dict[int, int] = {}
        self._last_pair: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = []
        """For each position, where the pair that ends there ended before; -1: nowhere."""

    def extend(self, token_ids: list[int]) -> None:
        """Add all tokens except the last one."""
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
        """End and length of the suffix's longest match, the latest on a tie; length 0 if none."""
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
    """Number of tokens up to ``end`` that equal those up to ``last``; the last two do."""
    most = min(_LONGEST, end + 1)
    length = 2
    while length < most and token_ids[end - length] == token_ids[last - length]:
        length += 1
    return length


def _continued(token_ids: list[int], end: int, count: int) -> list[int]:
    """The ``count`` tokens that follow ``end``. After the last token, the draft continues itself.

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
"""Names of the methods that use only the tokens."""
MAX_DRAFT_TOKENS = 13
"""Maximum drafted tokens of a sequence in a step: with its own token, a pass of linear.h."""

CostsOf = Callable[[int, int, int], list[float] | None]
"""Costs of steps with 0, 1, … drafted tokens; see ``DraftLength.choose``. Arguments: decoding
sequences, tokens without drafts, maximum drafted tokens. None: check no drafts."""


class StepSpeculation(Protocol):
    """The runner's interface to speculation, called step by step."""

    @property
    def drafter(self) -> str:
        """Name of the drafter."""

    @property
    def watches(self) -> bool:
        """Whether the runner has to call ``computed``."""

    @property
    def hidden_layers(self) -> tuple[int, ...]:
        """Layers of the model that ``computed`` needs; see ``StepInput.hidden_layers``."""

    def extend(self, rows: Sequence[PlanRow], known: Mapping[int, RunnerSequence]) -> list[PlanRow]:
        """Add the drafts that pay to the rows; ``known`` has every row's sequence by its id."""

    def takes_prompt(self) -> bool:
        """Whether to process one more sequence's prompt while it is computed."""

    def verified(self, sequence_id: int, drafted: int, kept: int) -> None:
        """Record that the first ``kept`` of a sequence's ``drafted`` tokens were right."""

    def computed(
        self,
        rows: Sequence[ComputedRow],
        hidden: torch.Tensor | None,
    ) -> None:
        """Process a computed step, whose tokens are drawn; see ``ModelDrafter.computed``."""

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        """Record the total duration of a step in which only ``batch`` sequences decoded."""

    def forget(self, sequence_id: int) -> None:
        """Drop a sequence's state."""

    def use_threads(self, threads: int) -> None:
        """See ``StepModel``."""

    def share_cores(self, share: CoreShare) -> None:
        """See ``ModelDrafter``."""


class Speculation:
    """Drafts with a ``Drafter``, which uses only tokens. Implements ``StepSpeculation``."""

    watches = False
    hidden_layers: tuple[int, ...] = ()

    def __init__(self, drafter: Drafter, length: DraftLength | None = None) -> None:
        """``length`` chooses how much of each draft is checked; None: by measured costs."""
        self._drafter = drafter
        self._length = length or DraftLength()
        self._drafts: dict[int, Draft] = {}

    @property
    def drafter(self) -> str:
        """Name of the drafter."""
        return self._drafter.name

    def extend(
        self,
        rows: Sequence[PlanRow],
        known: Mapping[int, RunnerSequence],
        costs_of: CostsOf | None = None,
    ) -> list[PlanRow]:
        """See ``StepSpeculation``. ``costs_of`` replaces the measured costs."""
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
        """Record that the first ``kept`` of a sequence's ``drafted`` tokens were right."""
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
        """Return False: this drafter processes no prompts."""
        return False

    def computed(self, rows: Sequence[ComputedRow], hidden: torch.Tensor | None) -> None:
        """Do nothing: ``watches`` is false."""

    def use_threads(self, threads: int) -> None:
        """Do nothing: this drafter uses no threads."""

    def share_cores(self, share: CoreShare) -> None:
        """Do nothing: this drafter uses no threads."""


def make_speculation(name: str) -> Speculation | None:
    """Make the speculation of a drafter that uses only tokens, by name; None for ``none``.

    Raises ValueError for another name.
    """
    drafter = make_drafter(name)
    return None if drafter is None else Speculation(drafter)


def make_drafter(name: str) -> Drafter | None:
    """Make a drafter by name, as ``make_speculation`` does."""
    if name not in TOKEN_DRAFTERS:
        raise ValueError(f"drafter {name!r} needs a model")
    return None if name == "none" else NgramDrafter()


def with_draft(row: PlanRow, draft: Sequence[int]) -> PlanRow:
    """Add a draft to a row of a sequence's last token."""
    return replace(row, count=row.count + len(draft), draft=tuple(draft))


def kept_tokens(draft: Sequence[int], drawn: Sequence[int]) -> int:
    """Number of leading tokens of a draft that equal those drawn in their places."""
    kept = 0
    while kept < len(draft) and draft[kept] == drawn[kept]:
        kept += 1
    return kept
