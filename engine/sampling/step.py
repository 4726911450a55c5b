"""The input and output of a model's step, and what each output is for.

A model is torch, the C++ decoder of the CPU, or the kernels of a GPU. A row of logits may serve
several draws when choices begin, or only score a token of the prompt.
"""

from __future__ import annotations

import operator
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
    """The input of one model step: the tokens of its rows, one sequence after another."""

    rows: tuple[PlanRow, ...]
    token_ids: list[int]
    """The tokens of all rows, one row after another, [tokens]."""
    outputs: list[int]
    """Indexes of the step's tokens whose logits are wanted."""
    greedy: bool
    """Whether only the most likely token of each output is wanted, and not its logits."""
    hidden_layers: tuple[int, ...] = ()
    """Layers whose inputs are returned for every token, for a drafter. 0 is the first layer, whose
    input is the embeddings. The number of layers means the output of the last layer, before the
    last norm."""
    features: torch.Tensor | None = None
    """Features for an EAGLE head, fp32 [tokens, hidden_size]."""
    states: torch.Tensor | None = None
    """Inputs of the target's layers, fp32 [tokens, layers, hidden_size]. An EAGLE head computes its
    features from these inputs. Either this field or ``features`` is set."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Output of one step: ``best`` for a greedy step, and ``logits`` otherwise."""

    best: list[int] | None
    """For a greedy step, the most likely token of each output; the lowest id on a tie."""
    logits: torch.Tensor | None
    """Logits of each output, fp32 [outputs, vocab_size]; None for a greedy step. The next step may
    overwrite them."""
    hidden: torch.Tensor | None = None
    """Inputs of the layers ``StepInput.hidden_layers``, fp32 [tokens, hidden_layers, hidden_size];
    None if none are wanted. The next step may overwrite it."""


class StepModel(Protocol):
    """Computes steps of a decoder model over a KV cache. Only the engine thread calls it."""

    @property
    def layers_done(self) -> int:
        """Number of layers that have stored the KV of all tokens of the running step.

        Any thread may read it. It is 0 if the number is not known before the step's end.
        """

    def clear_progress(self) -> None:
        """Reset ``layers_done`` before a step."""

    def run(self, step: StepInput) -> StepOutput:
        """Compute a step's tokens, and store their KV in the cache."""

    def use_threads(self, threads: int) -> None:
        """Use this number of CPU threads from the next step on."""


@dataclass(slots=True)
class StepWork:
    """Collects the work of a step, row by row of the plan."""

    token_ids: list[int] = field(default_factory=list)
    """The tokens of all rows, one row after another."""
    outputs: list[int] = field(default_factory=list)
    """Indexes of the step's tokens that have logits."""
    draws: list[SampleRow] = field(default_factory=list)
    draw_rows: list[int] = field(default_factory=list)
    """For each draw, the index of the output (row of logits) that it uses."""
    row_draws: list[int] = field(default_factory=list)
    """For each row that samples, its number of draws."""
    scored: list[Scored] = field(default_factory=list)
    """Prompt tokens whose log probabilities are wanted."""
    one_each: bool = True
    """Whether draw k uses output k, for each output. Equal numbers of outputs and draws do not
    prove this: a step may score a prompt token and draw two choices from another output."""
    needs_logits: bool = False
    """Whether the step must return logits, because the most likely tokens are not enough."""
    needs_host: bool = False
    """Whether a draw changes its logits, or wants log probabilities, so that the host draws."""
    needs_masks: bool = False
    """Whether a draw needs a mask, which depends on the newest tokens."""
    embedded: dict[int, int] = field(default_factory=dict)
    """For each row (key) that wants an embedding, the index of the token to embed."""

    def score(self, row: PlanRow, known: Sequence[int], top: int) -> None:
        """For each of the first ``row.scored`` tokens of a row, request the log probability of the
        prompt token that follows it. The caller must have added the row's tokens to ``token_ids``
        just before."""
        self.needs_logits = True
        self.one_each = False
        begin = len(self.token_ids) - row.count
        for n in range(row.scored):
            self.scored.append(Scored(len(self.outputs), known[row.start + n + 1], top))
            self.outputs.append(begin + n)

    def draw(self, draws: Sequence[SampleRow]) -> None:
        """Add one draw for each of the step's last tokens, as many as there are ``draws``. Each
        draw uses the logits of its token.

        These tokens are a row's last token, or the row's own token and its draft tokens.
        """
        first = len(self.outputs)
        self.draw_rows += range(first, first + len(draws))
        self.outputs += range(len(self.token_ids) - len(draws), len(self.token_ids))
        self._add(draws)

    def draw_next(self, token: int, draw: SampleRow) -> None:
        """Add a row of one ``token``, and the draw of the token after it.

        It is the common case of ``draw``: the draw must be ``plain`` and want no log probabilities.
        """
        self.draw_rows.append(len(self.outputs))
        self.outputs.append(len(self.token_ids))
        self.token_ids.append(token)
        self.draws.append(draw)
        self.row_draws.append(1)
        if draw.sampling.temperature:
            self.needs_logits = True

    def draw_choices(self, draws: Sequence[SampleRow]) -> None:
        """Add several draws that all use the logits of the step's last token."""
        self.one_each = False
        self.draw_rows += [len(self.outputs)] * len(draws)
        self.outputs.append(len(self.token_ids) - 1)
        self._add(draws)

    def _add(self, draws: Sequence[SampleRow]) -> None:
        self.draws += draws
        self.row_draws.append(len(draws))
        for draw in draws:
            scored = draw.sampling.logprobs is not None
            self.needs_host |= scored or draw.adjusted
            self.needs_masks |= draw.bound
            self.needs_logits |= scored or not (draw.plain and draw.sampling.greedy)

    @property
    def on_device(self) -> bool:
        """Whether a GPU can make all draws of the step without the host.

        If true, each output has one draw and no score, and nothing is embedded.
        """
        return self.one_each and not (self.needs_host or self.embedded)

    def draw_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Select a row of logits for each draw from [outputs, vocab_size]."""
        if self.one_each:
            return logits
        return logits[torch.tensor(self.draw_rows, dtype=torch.int64, device=logits.device)]

    def draw_best(self, best: Sequence[int]) -> list[int]:
        """Select the token of each draw from the most likely tokens of the outputs."""
        return [best[row] for row in self.draw_rows]


def result_of(
    step: int,
    rows: Sequence[PlanRow],
    work: StepWork,
    tokens: tuple[tuple[int, ...], ...],
    logits: torch.Tensor | None,
    scorer: Scorer,
) -> StepResult:
    """Assemble the result of a step: new tokens, and the log probabilities that are wanted.

    ``tokens`` has each row's new tokens. ``StepResult.seconds`` is not set yet.
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


_SAMPLES = operator.attrgetter("sample")


def by_row(rows: Sequence[PlanRow], drawn: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Split drawn tokens by row. Each row that samples must have one draw; other rows get none."""
    # The usual step costs no call of Python for each row.
    if all(map(_SAMPLES, rows)):
        return zip(drawn)
    tokens = iter(drawn)
    return ((next(tokens),) if row.sample else () for row in rows)


def _token_logprobs(
    rows: Sequence[PlanRow],
    work: StepWork,
    tokens: tuple[tuple[int, ...], ...],
    logits: torch.Tensor,
    scorer: Scorer,
) -> tuple[tuple[TokenLogprobs, ...] | None, ...]:
    """Compute the log probabilities of each row's new tokens. None for a row that wants none; empty
    if no row wants any."""
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
