"""The input and output of a model's step, and what each output is for.

A model is torch, the C++ decoder of the CPU, or the kernels of a GPU. A row of logits may serve
several draws when choices begin, or only score a token of the prompt.
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
    """The tokens of one step, one sequence after another."""

    rows: tuple[PlanRow, ...]
    token_ids: list[int]
    """The ``count`` tokens of every row, [tokens]."""
    outputs: list[int]
    """Indexes of the tokens whose logits are wanted."""
    greedy: bool
    """Whether only their most likely tokens are wanted."""
    hidden_layers: tuple[int, ...] = ()
    """Layers whose inputs a drafter wants, for every token. 0 is the first layer, whose input is
    the embeddings. The number of layers is the output of the last layer, before the last norm."""
    features: torch.Tensor | None = None
    """Features for an EAGLE head, fp32 [tokens, hidden_size]."""
    states: torch.Tensor | None = None
    """Inputs of the target's layers, fp32 [tokens, layers, hidden_size]. The head computes its
    features from them; set instead of ``features``."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of one step: ``best`` for a greedy step, and ``logits`` otherwise."""

    best: list[int] | None
    """The most likely token of each output; the lowest id on a tie."""
    logits: torch.Tensor | None
    """fp32 [outputs, vocab_size]; the next step may overwrite it."""
    hidden: torch.Tensor | None = None
    """fp32 [tokens, hidden_layers, hidden_size], in the order of ``StepInput.hidden_layers``; None
    if none are wanted. The next step may overwrite it."""


class StepModel(Protocol):
    """A decoder over a KV cache. Only the engine thread calls it."""

    @property
    def layers_done(self) -> int:
        """Number of layers that have stored the KV of all tokens of the running step.

        Any thread may read it. It is 0 if the number is not known before the step's end.
        """

    def clear_progress(self) -> None:
        """Reset ``layers_done`` before a step."""

    def run(self, step: StepInput) -> StepOutput:
        """Compute the tokens, and store their KV."""

    def use_threads(self, threads: int) -> None:
        """Use this number of CPU threads from the next step on."""


@dataclass(slots=True)
class StepWork:
    """Collects the work of a step, row by row of the plan."""

    token_ids: list[int] = field(default_factory=list)
    """The tokens of every row."""
    outputs: list[int] = field(default_factory=list)
    """Indexes of the tokens that have logits."""
    draws: list[SampleRow] = field(default_factory=list)
    draw_rows: list[int] = field(default_factory=list)
    """The output from whose logits each draw is made."""
    row_draws: list[int] = field(default_factory=list)
    """Number of draws of each row that samples."""
    scored: list[Scored] = field(default_factory=list)
    """Prompt tokens whose log probabilities are wanted."""
    embedded: dict[int, int] = field(default_factory=dict)
    """The token whose embedding is wanted, by row."""

    def score(self, row: PlanRow, known: Sequence[int], top: int) -> None:
        """Score the next tokens of a row's first tokens. The row's tokens were added last."""
        begin = len(self.token_ids) - row.count
        for n in range(row.scored):
            self.scored.append(Scored(len(self.outputs), known[row.start + n + 1], top))
            self.outputs.append(begin + n)

    def draw(self, draws: Sequence[SampleRow]) -> None:
        """Draw one token from the logits of each of the last tokens.

        That is the last token, or the tokens of a draft and the one before it.
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
        """Whether the most likely tokens alone are not enough."""
        if self.scored:
            return True
        for draw in self.draws:
            sampling = draw.sampling
            if not (sampling.greedy and sampling.logprobs is None and draw.plain):
                return True
        return False

    @property
    def on_device(self) -> bool:
        """Whether a GPU can make all draws without the host.

        Each output then has one draw and no score, and nothing is embedded.
        """
        if len(self.outputs) != len(self.draws) or self.embedded:
            return False
        return not any(draw.adjusted or draw.sampling.logprobs is not None for draw in self.draws)

    def draw_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """One row for each draw, from [outputs, vocab_size]."""
        if len(self.outputs) == len(self.draws):
            return logits
        return logits[torch.tensor(self.draw_rows, dtype=torch.int64, device=logits.device)]

    def draw_best(self, best: Sequence[int]) -> list[int]:
        """The token of each draw, from those of the outputs."""
        return [best[row] for row in self.draw_rows]


def result_of(
    step: int,
    rows: Sequence[PlanRow],
    work: StepWork,
    tokens: tuple[tuple[int, ...], ...],
    logits: torch.Tensor | None,
    scorer: Scorer,
) -> StepResult:
    """Assemble the result of a step, with the scores that are wanted.

    ``tokens`` has each row's tokens. The seconds of the step are not set yet.
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
    """Each row's tokens, if every row that samples has one draw."""
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
    """Scores of each row's tokens; None for a row that wants none; empty if no row does."""
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
