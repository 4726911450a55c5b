"""What a step's tokens are drawn from and scored by: the rows of its logits, and what each is for.

A row of logits may serve several draws, where choices begin, and a row may be there to score a
token of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from baton.logprobs import TokenLogprobs
from engine.logprobs import Scored, Scorer
from engine.plan import PlanRow
from engine.sampling import SampleRow


@dataclass(slots=True)
class StepWork:
    """Filled row by row of the plan, in order."""

    token_ids: list[int] = field(default_factory=list)
    """Of every row its tokens."""
    outputs: list[int] = field(default_factory=list)
    """Which of them have logits."""
    draws: list[SampleRow] = field(default_factory=list)
    draw_rows: list[int] = field(default_factory=list)
    """The output from whose logits each is drawn."""
    scored: list[Scored] = field(default_factory=list)
    """The prompts' tokens whose log probabilities are wanted."""

    def score(self, row: PlanRow, known: Sequence[int], top: int) -> None:
        """The logits of a row's first tokens, which are the last ones here, score the next."""
        begin = len(self.token_ids) - row.count
        for n in range(row.scored):
            self.scored.append(Scored(len(self.outputs), known[row.start + n + 1], top))
            self.outputs.append(begin + n)

    def draw(self, row: SampleRow, others: Sequence[SampleRow] = ()) -> None:
        """Draw these from the logits of the last token."""
        self.draw_rows += [len(self.outputs)] * (1 + len(others))
        self.draws.append(row)
        self.draws += others
        self.outputs.append(len(self.token_ids) - 1)

    @property
    def needs_logits(self) -> bool:
        """Whether the likeliest tokens alone do not do."""
        if self.scored:
            return True
        for draw in self.draws:
            sampling = draw.sampling
            if not (sampling.greedy and sampling.logprobs is None and draw.plain):
                return True
        return False

    @property
    def on_device(self) -> bool:
        """Whether each output has one draw, that a GPU can make without the host, and no score."""
        if len(self.outputs) != len(self.draws):
            return False
        return not any(draw.adjusted or draw.sampling.logprobs is not None for draw in self.draws)

    def draw_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """One row for each draw, of [outputs, vocab_size]."""
        if len(self.outputs) == len(self.draws):
            return logits
        return logits[torch.tensor(self.draw_rows, dtype=torch.int64, device=logits.device)]

    def draw_best(self, best: Sequence[int]) -> list[int]:
        """The token of each draw, of those of the outputs."""
        return [best[row] for row in self.draw_rows]


@dataclass(frozen=True, slots=True)
class StepFound:
    """What a step brought: as ``StepResult`` has it, and has its fields' names."""

    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[TokenLogprobs, ...] | None, ...] = ()
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()


def found_of(
    rows: Sequence[PlanRow],
    work: StepWork,
    drawn: Sequence[int],
    logits: torch.Tensor | None,
    scorer: Scorer,
) -> StepFound:
    """Sort what was drawn to its rows, and score what is to be scored."""
    tokens = tuple(by_row(rows, drawn))
    if logits is None:
        return StepFound(tokens)
    of_draws = _draw_logprobs(work, drawn, logits, scorer)
    scores = iter(scorer(logits, work.scored)) if work.scored else iter(())
    return StepFound(
        tokens,
        tuple(_own(of_draws, row) for row in rows) if of_draws is not None else (),
        tuple(tuple(islice(scores, row.scored)) for row in rows) if work.scored else (),
    )


def by_row(rows: Sequence[PlanRow], drawn: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The tokens of each row: one for each choice of those that sample, in their order."""
    tokens = iter(drawn)
    for row in rows:
        if row.sample and row.choices == 1:
            yield (next(tokens),)
        else:
            yield tuple(islice(tokens, row.choices)) if row.sample else ()


def _draw_logprobs(
    work: StepWork, drawn: Sequence[int], logits: torch.Tensor, scorer: Scorer
) -> Iterator[TokenLogprobs | None] | None:
    """Of each draw, None for those that want none; None if none does."""
    wanted = [
        Scored(row, token, draw.sampling.logprobs)
        for draw, row, token in zip(work.draws, work.draw_rows, drawn, strict=True)
        if draw.sampling.logprobs is not None
    ]
    if not wanted:
        return None
    found = iter(scorer(logits, wanted))
    return iter([next(found) if d.sampling.logprobs is not None else None for d in work.draws])


def _own(
    of_draws: Iterator[TokenLogprobs | None], row: PlanRow
) -> tuple[TokenLogprobs, ...] | None:
    found = list(islice(of_draws, row.choices)) if row.sample else []
    return tuple(each for each in found if each is not None) or None
