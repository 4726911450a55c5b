"""Computes the costs of a live cluster's workers from a client's timings. No clock, no I/O."""

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
"""Number of short prompts from which the time of a message is computed. For long prompts, that time
is too small a part of the whole."""


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """Time of a prompt that ran alone, without cached tokens."""

    tokens: int
    first_token_s: float
    """Time from sending a request for only one output token until that token arrives, in
    seconds."""
    reserved_first_s: float
    """Time to the first token of a request for several tokens, in seconds. It includes a round trip
    that reserves blocks."""


@dataclass(frozen=True, slots=True)
class TimedBatch:
    """Timing of concurrent answers, while all of them were decoding."""

    batch: int
    context_tokens: float
    """Number of tokens that all the answers together attended to, on average over the steps."""
    gap_s: float
    """Mean gap between tokens of an answer."""


@dataclass(frozen=True, slots=True)
class TimedHandoff:
    """The time between the first and the second token of an answer that runs alone. It includes a
    handoff and a step."""

    bytes: float
    context_tokens: int
    gap_s: float


@dataclass(frozen=True, slots=True)
class TimedSharing:
    """Timing of prompts and answers that were computed at the same time; all figures are means."""

    alone_gap_s: float
    """Gap between an answer's tokens while no prompt was computed."""
    beside_gap_s: float
    """Gap between an answer's tokens during the first ``worker.cores.core_sharing.PATIENCE_S`` of a
    prompt."""
    beside_long_gap_s: float
    """Gap between an answer's tokens in the rest of a prompt, after
    ``worker.cores.core_sharing.PATIENCE_S``."""
    alone_first_s: float
    """Time from sending a prompt to its first token, while no sequence decoded."""
    beside_first_s: float
    """Time from sending a prompt to its first token, while sequences decoded."""


@dataclass(frozen=True, slots=True)
class LiveTimings:
    """All timings of a live cluster."""

    prompts: tuple[TimedPrompt, ...]
    batches: tuple[TimedBatch, ...]
    handoffs: tuple[TimedHandoff, ...]
    sharing: tuple[TimedSharing, ...]


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """The costs of a live cluster's workers that fit its timings best."""

    costs: StepCosts
    handoff_s: float
    """Time of a handoff in seconds, without the time to transfer its bytes."""
    wire_bytes_per_s: float
    call_s: float
    """Time of a message, one way."""
    sharing: Sharing


def live_costs(timings: LiveTimings, limits: SchedulerLimits) -> LiveCosts:
    """Return the costs that explain the timings best, for workers with these scheduler limits.

    The fit minimizes squared relative errors, as workers do for their own steps. The time of a
    handoff is modeled as linear in its bytes, and fitted by least squares.
    """
    call_s = _call_s(timings.prompts)
    points, prompt_ms = [], []
    for prompt in timings.prompts:
        # Each chunk is a step: the mean time is a + b*n + c*n*context of its share.
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
    """Return the time of a message. It is computed from short prompts, whose first token is delayed
    by a round trip."""
    shortest = sorted(prompts, key=lambda prompt: prompt.tokens)[:_SHORT_PROMPTS]
    added = [prompt.reserved_first_s - prompt.first_token_s for prompt in shortest]
    return max(_MIN_CALL_S, statistics.median(added) / 2)


def _chunks(tokens: int, limits: SchedulerLimits) -> int:
    """Return the number of steps for a prompt of ``tokens`` tokens that runs alone."""
    start = count = 0
    while start < tokens:
        start += limits.max_tokens(start)
        count += 1
    return count


def _sharing(timed: Sequence[TimedSharing], call_s: float) -> Sharing:
    """Return the slowdown of workers that share a host: the mean of the timings. Workers of the
    same role were not timed; their slowdown is assumed to be equal.
    """
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
    """Fit a straight line to the points. Return its intercept and its slope.

    The intercept is at least 0, and the slope is positive: at most 100 GB/s.
    """
    least = 1e-11
    if len(set(x)) > 1:
        slope, intercept = np.polyfit(x, y, 1).tolist()
        if slope >= least:
            return max(0.0, intercept), slope
    return (statistics.fmean(y) if y else 0.0), least
