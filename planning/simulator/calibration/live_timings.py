"""From what a client has timed at a live cluster to the costs of its workers. No clock, no I/O."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.scheduling.sequence import SchedulerLimits
from planning.simulator.costs.sharing import ALONE, Sharing
from worker.costs.step_costs import StepCosts, fit

_MIN_MS = 1e-3
_MIN_CALL_S = 0.0005
_SHORT_PROMPTS = 4
"""Whose times tell that of a message: it is little beside those of longer ones."""


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """A prompt alone, of which nothing was cached."""

    tokens: int
    first_token_s: float
    """From sending to the first token, of an answer of one token."""
    reserved_first_s: float
    """The same of a longer answer, for which room is reserved first: a message there and back."""


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """Answers side by side, while all of them were decoding."""

    batch: int
    context_tokens: float
    """That all of them attended to, on average over the steps."""
    gap_s: float
    """Between tokens, the mean."""


@dataclass(frozen=True, slots=True)
class TimedHandoff:
    """The gap between a lone answer's first token and its second: a handoff and a step."""

    bytes: float
    context_tokens: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class TimedSharing:
    """Prompts and answers computed at the same time; means."""

    alone_gap_s: float
    """Between tokens while no prompt was computed."""
    beside_gap_s: float
    """While one was, for the first ``worker.cores.core_sharing.PATIENCE_S``."""
    beside_long_gap_s: float
    """While one was, behind that."""
    alone_first_s: float
    """From sending a prompt to its first token while nobody decoded."""
    beside_first_s: float
    """While others did."""


@dataclass(frozen=True, slots=True)
class LiveTimings:
    """All that was timed."""

    prompts: tuple[TimedPrompt, ...]
    batches: tuple[TimedBatch, ...]
    handoffs: tuple[TimedHandoff, ...]
    sharing: tuple[TimedSharing, ...]


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """What fits them best."""

    costs: StepCosts
    handoff_s: float
    """Of a handoff without bytes."""
    wire_bytes_per_s: float
    call_s: float
    """A message, one way."""
    sharing: Sharing


def live_costs(timings: LiveTimings, limits: SchedulerLimits) -> LiveCosts:
    """The costs that explain the timings, of workers whose chunks have these limits.

    Least squares of relative errors, as workers fit their own steps; a handoff is a line in its
    bytes, by least squares.
    """
    call_s = _call_s(timings.prompts)
    points, prompt_ms = [], []
    for prompt in timings.prompts:
        # Each chunk is a step: the mean one's time is a + b*n + c*n*context of its share.
        chunks, tokens = _chunks(prompt.tokens, limits), prompt.tokens
        points.append((tokens / chunks, tokens * tokens / 2 / chunks))
        prompt_ms.append(max(_MIN_MS, (prompt.first_token_s - 2 * call_s) * 1e3 / chunks))
    prefill = fit(points, prompt_ms)
    step = fit(
        [(b.batch, b.context_tokens) for b in timings.batches],
        [max(_MIN_MS, b.gap_s * 1e3) for b in timings.batches],
    )
    costs = StepCosts(prefill, step)
    sizes = [handoff.bytes for handoff in timings.handoffs]
    rest_s = [
        max(0.0, h.gap_s - costs.step_ms(1, h.context_tokens) / 1e3) for h in timings.handoffs
    ]
    fixed_s, per_byte_s = _line(sizes, rest_s)
    return LiveCosts(costs, fixed_s, 1.0 / per_byte_s, call_s, _sharing(timings.sharing, call_s))


def _call_s(prompts: Sequence[TimedPrompt]) -> float:
    """A message, by what one there and back adds to the first token of short prompts."""
    shortest = sorted(prompts, key=lambda prompt: prompt.tokens)[:_SHORT_PROMPTS]
    added = [prompt.reserved_first_s - prompt.first_token_s for prompt in shortest]
    return max(_MIN_CALL_S, statistics.median(added) / 2)


def _chunks(tokens: int, limits: SchedulerLimits) -> int:
    """The steps of a prompt alone."""
    start = count = 0
    while start < tokens:
        start += limits.max_tokens(start)
        count += 1
    return count


def _sharing(timed: Sequence[TimedSharing], call_s: float) -> Sharing:
    """The mean of what was timed. Between workers of one role nothing was: taken as large."""
    if not timed:
        return ALONE
    decode, long, prefill = (
        max(1.0, statistics.fmean(values))
        for values in (
            [one.beside_gap_s / one.alone_gap_s for one in timed],
            [one.beside_long_gap_s / one.alone_gap_s for one in timed],
            [
                (one.beside_first_s - 2 * call_s) / max(1e-6, one.alone_first_s - 2 * call_s)
                for one in timed
            ],
        )
    )
    return Sharing(decode, long, decode, prefill, prefill)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope; the one not negative, the other positive: at most 100 GB/s."""
    least = 1e-11
    if len(set(x)) > 1:
        slope, intercept = np.polyfit(x, y, 1).tolist()
        if slope >= least:
            return max(0.0, intercept), slope
    return (statistics.fmean(y) if y else 0.0), least
