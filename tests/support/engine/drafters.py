"""Drafters for tests, and a draft length that does not depend on how long steps take."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from baton.sampling_params import SamplingParams
from engine.scheduling.plan import RunnerSequence
from engine.speculation.length import DraftLength, Proposal
from engine.speculation.model.length import Candidate, ModelDraftLength
from engine.speculation.speculation import MAX_DRAFT_TOKENS, Draft


class WholeDrafts(DraftLength):
    """Every token of every draft is checked."""

    def choose(
        self,
        batch: int,
        rows: int,
        proposals: Sequence[Proposal],
        costs: list[float] | None = None,
    ) -> list[int]:
        return [proposal.tokens - proposal.drawn for proposal in proposals]


class FixedLength(ModelDraftLength):
    """Every sequence drafts this number of tokens, whatever that costs."""

    def __init__(self, tokens: int = 5, *, prompts: bool = True) -> None:
        """``prompts``: whether the drafter takes prompts in at once."""
        super().__init__()
        self.tokens = tokens
        self.prompts = prompts
        self.backlogs: list[int] = []

    def takes_prompt(self) -> bool:
        return self.prompts

    def wanted(self, batch: int, candidates: Sequence[Candidate]) -> list[int]:
        self.backlogs += [candidate.backlog for candidate in candidates]
        return [min(self.tokens, candidate.most) for candidate in candidates]


class Oracle:
    """Knows the answers; ``wrong`` is the chance that it says another token."""

    name = "oracle"

    def __init__(self, wrong: float, vocab: int, answers: dict[int, list[int]]) -> None:
        """``answers``: of each sequence all its tokens, prompt and output."""
        self.answers = answers
        self._wrong = wrong
        self._vocab = vocab
        self._random = Random(0)
        self.forgotten: list[int] = []

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        assert 0 < most <= MAX_DRAFT_TOKENS
        answer = self.answers[sequence_id]
        # A step that was planned before the end was known goes on behind it.
        said = token_ids[: len(answer)]
        assert answer[: len(said)] == said, "not what was answered without drafts"
        right = answer[len(token_ids) : len(token_ids) + self._random.randint(1, most)]
        draft = [self._another(t) if self._random.random() < self._wrong else t for t in right]
        return Draft(draft, 1) if draft else None

    def _another(self, token: int) -> int:
        return (token + self._random.randrange(1, self._vocab)) % self._vocab

    def forget(self, sequence_id: int) -> None:
        self.forgotten.append(sequence_id)


def known_as(token_ids: list[int]) -> RunnerSequence:
    """A sequence that a drafter is asked about, with the tokens alone that it looks at."""
    return RunnerSequence(token_ids, len(token_ids), SamplingParams(), (), 0)
