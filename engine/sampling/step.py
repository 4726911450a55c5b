"""A step of a model: what it is asked, whatever computes it, and what its outputs are for.

A model is torch, the CPU's C++ or the GPU's kernels. A row of logits may serve several draws, where
choices begin, and a row may be there to score a token of the prompt alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch

from baton.logprobs import TokenLogprobs
from engine.sampling.logprobs import Scored, Scorer
from engine.sampling.sampling import SampleRow
from engine.scheduling.plan import PlanRow, StepResult


@dataclass(frozen=True, slots=True)
class StepInput:
    """The tokens of one step, all sequences after one another."""

    rows: tuple[PlanRow, ...]
    token_ids: list[int]
    """[tokens]: of every row its ``count`` tokens."""
    outputs: list[int]
    """Which of the tokens' logits are wanted."""
    greedy: bool
    """Whether their likeliest tokens are all that is wanted."""
    hidden_layers: tuple[int, ...] = ()
    """Of which layers what goes into them is wanted, of every token, for a drafter: 0 is the first
    layer, whose input are the embeddings; the number of layers stands for what comes out of the
    last one, before the last norm."""
    features: torch.Tensor | None = None
    """fp32 [tokens, hidden_size]: what an EAGLE head takes beside the tokens."""
    states: torch.Tensor | None = None
    """fp32 [tokens, layers, hidden_size], in place of ``features``: what went into the target's
    layers, which the head makes them of."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Of the first two one: ``best`` for a greedy step, else ``logits``."""

    best: list[int] | None
    """The likeliest token of each output; of equals the lowest."""
    logits: torch.Tensor | None
    """fp32 [outputs, vocab_size]; it may be overwritten by the next step."""
    hidden: torch.Tensor | None = None
    """fp32 [tokens, hidden_layers, hidden_size], in the order of ``StepInput.hidden_layers``; None
    where none are wanted. It may be overwritten by the next step."""


class StepModel(Protocol):
    """A decoder over a KV cache. Called by the engine thread alone."""

    @property
    def layers_done(self) -> int:
        """Layers that have stored the KV of all tokens of the step that runs; any thread may ask.

        0 where that is not known before the step's end.
        """

    def clear_progress(self) -> None:
        """Before a step: none of its layers is done."""

    def run(self, step: StepInput) -> StepOutput:
        """Compute the tokens, and store their KV."""

    def use_threads(self, threads: int) -> None:
        """Take this many threads of the CPU from the next step on."""


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
    row_draws: list[int] = field(default_factory=list)
    """How many of them each row has that samples."""
    scored: list[Scored] = field(default_factory=list)
    """The prompts' tokens whose log probabilities are wanted."""
    embedded: dict[int, int] = field(default_factory=dict)
    """By row: the token whose embedding is wanted."""

    def score(self, row: PlanRow, known: Sequence[int], top: int) -> None:
        """The logits of a row's first tokens, which are the last ones here, score the next."""
        begin = len(self.token_ids) - row.count
        for n in range(row.scored):
            self.scored.append(Scored(len(self.outputs), known[row.start + n + 1], top))
            self.outputs.append(begin + n)

    def draw(self, draws: Sequence[SampleRow]) -> None:
        """Draw one token from the logits of each of the last tokens: of the last, or of those of a

        draft and the one before it.
        """
        first = len(self.outputs)
        self.draw_rows += range(first, first + len(draws))
        self.outputs += range(len(self.token_ids) - len(draws), len(self.token_ids))
        self.draws += draws
        self.row_draws.append(len(draws))

    def draw_choices(self, draws: Sequence[SampleRow]) -> None:
        """Draw all of these from the logits of the last token."""
        self.draw_rows += [len(self.outputs)] * len(draws)
        self.outputs.append(len(self.token_ids) - 1)
        self.draws += draws
        self.row_draws.append(len(draws))

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
        """Whether each output has one draw, that a GPU can make without the host, and no score, and

        nothing is embedded.
        """
        if len(self.outputs) != len(self.draws) or self.embedded:
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


def result_of(
    step: int,
    rows: Sequence[PlanRow],
    work: StepWork,
    tokens: tuple[tuple[int, ...], ...],
    logits: torch.Tensor | None,
    scorer: Scorer,
) -> StepResult:
    """What was found for each row, with the scores that are wanted; ``tokens`` are each row's.

    The seconds of the step are still to come.
    """
    if logits is None:
        return StepResult(step, tokens)
    scores = iter(scorer(logits, work.scored)) if work.scored else iter(())
    return StepResult(
        step,
        tokens,
        logprobs=_token_logprobs(rows, work, tokens, logits, scorer),
        prompt_logprobs=tuple(tuple(islice(scores, row.scored)) for row in rows)
        if work.scored
        else (),
    )


def by_row(rows: Sequence[PlanRow], drawn: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The tokens of each row where each that samples has one."""
    tokens = iter(drawn)
    for row in rows:
        yield (next(tokens),) if row.sample else ()


def _token_logprobs(
    rows: Sequence[PlanRow],
    work: StepWork,
    tokens: tuple[tuple[int, ...], ...],
    logits: torch.Tensor,
    scorer: Scorer,
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    """Of each row's tokens, None for a row that wants none; empty if none does."""
    if all(draw.sampling.logprobs is None for draw in work.draws):
        return ()
    wanted: list[Scored] = []
    counts: list[int] = []
    at, draws = 0, iter(work.row_draws)
    for row, found in zip(rows, tokens, strict=True):
        counts.append(0)
        if not row.sample:
            continue
        top = work.draws[at].sampling.logprobs
        if top is not None:
            counts[-1] = len(found)
            places = work.draw_rows[at : at + len(found)]
            wanted += (
                Scored(place, token, top) for place, token in zip(places, found, strict=True)
            )
        at += next(draws)
    scores = iter(scorer(logits, wanted))
    return tuple(tuple(islice(scores, count)) or None for count in counts)
