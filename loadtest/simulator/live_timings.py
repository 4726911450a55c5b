"""From what a client has timed at a live cluster to the costs of its workers. No clock, no I/O."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from worker.step_costs import StepCosts, fit

_LEAST_MS = 1e-3


@dataclass(frozen=True, slots=True)
class TimedPrompt:
    """A prompt alone, of which nothing was cached."""

    tokens: int
    first_token_s: float
    """From sending to the first token."""


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
class LiveTimings:
    """All that was timed."""

    prompts: tuple[TimedPrompt, ...]
    batches: tuple[TimedBatch, ...]
    handoffs: tuple[TimedHandoff, ...]


@dataclass(frozen=True, slots=True)
class LiveCosts:
    """What fits them best."""

    costs: StepCosts
    handoff_s: float
    """Of a handoff without bytes."""
    wire_bytes_per_s: float


def live_costs(timings: LiveTimings, calls_s: float) -> LiveCosts:
    """The costs that explain the timings, with ``calls_s`` of messages in every first token.

    Least squares of relative errors, as workers fit their own steps; a handoff is a line in its
    bytes, by least squares.
    """
    prompt_ms = [max(_LEAST_MS, (p.first_token_s - calls_s) * 1e3) for p in timings.prompts]
    prefill = fit([(p.tokens, p.tokens * p.tokens / 2) for p in timings.prompts], prompt_ms)
    step = fit(
        [(b.batch, b.context_tokens) for b in timings.batches],
        [max(_LEAST_MS, b.gap_s * 1e3) for b in timings.batches],
    )
    costs = StepCosts(prefill, step)
    sizes = [handoff.bytes for handoff in timings.handoffs]
    rest_s = [
        max(0.0, h.gap_s - costs.step_ms(1, h.context_tokens) / 1e3) for h in timings.handoffs
    ]
    fixed_s, per_byte_s = _line(sizes, rest_s)
    return LiveCosts(costs, fixed_s, 1.0 / per_byte_s)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Intercept and slope; the one not negative, the other positive: at most 100 GB/s."""
    least = 1e-11
    if len(set(x)) > 1:
        slope, intercept = np.polyfit(x, y, 1).tolist()
        if slope >= least:
            return max(0.0, intercept), slope
    return (statistics.fmean(y) if y else 0.0), least
