"""When a request would have its tokens, were it sent to the workers now."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Forecast:
    """Milliseconds. Zero is what is not known yet: nobody is refused for want of knowledge."""

    ttft_ms: float = 0.0
    """From sending to the first token, with the queue of the worker that would be chosen."""
    tpot_ms: float = 0.0
    """Per further token."""


def forecast_by_rate(
    prompt_tokens: int,
    ahead_tokens: float,
    workers: int,
    tokens_per_s: float | None,
    tpot_s: float | None,
) -> Forecast:
    """From the drain rate of ``workers`` prefill workers, of which one computes a whole prompt.

    ``ahead_tokens`` were sent to them and are still to be computed.
    """
    if tokens_per_s is None:
        return Forecast(0.0, 1e3 * (tpot_s or 0.0))
    seconds = (ahead_tokens + prompt_tokens * max(1, workers)) / tokens_per_s
    return Forecast(1e3 * seconds, 1e3 * (tpot_s or 0.0))
