"""What one worker can do of each role while it keeps the SLOs. Pure.

From what its steps cost: its own calibration, corrected by the steps that it was seen to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.autoscaling.traffic_counts import TrafficCounts
from baton.store.registry import WorkerRecord

_MAX_CORRECTION = 4.0
"""Steps that were seen may be so many times faster or slower than calibrated; beyond that they say
more of the moment than of the worker."""
_ENOUGH_S = 0.5
"""Seconds of engines in which prompts were computed, before these are believed."""
_MIN_CONTEXT = 1.0


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """Of a decode worker."""

    batch: float
    """Sequences that it can run with a step that takes no more than the SLO."""
    tokens_per_s: float
    """That it generates then."""


def decode_capacity(
    records: Sequence[WorkerRecord], context_tokens: float, slo_tpot_s: float
) -> DecodeCapacity | None:
    """Of the mean worker, with so many tokens of context a sequence; None: nothing is known."""
    found = [_decode(record, max(context_tokens, _MIN_CONTEXT), slo_tpot_s) for record in records]
    known = [one for one in found if one is not None]
    if not known:
        return None
    return DecodeCapacity(
        sum(one.batch for one in known) / len(known),
        sum(one.tokens_per_s for one in known) / len(known),
    )


def _decode(
    record: WorkerRecord, context_tokens: float, slo_tpot_s: float
) -> DecodeCapacity | None:
    a, b, c = record.step_cost
    if not any(record.step_cost):
        return None
    correction = _correction(record)
    alone_ms, each_ms = correction * a, correction * (b + c * context_tokens)
    room = record.total_blocks * record.geometry.block_size / context_tokens
    most = max(1.0, min(float(record.max_sequences), room))
    fits = (slo_tpot_s * 1e3 - alone_ms) / each_ms if each_ms else most
    batch = min(most, max(1.0, fits))
    return DecodeCapacity(batch, 1e3 * batch / (alone_ms + each_ms * batch))


def _correction(record: WorkerRecord) -> float:
    """How much longer its latest steps took than they were calibrated to."""
    load = record.load
    a, b, c = record.step_cost
    said = a + b * load.step_batch + c * load.step_context_tokens
    if not load.step_ms or said <= 0:
        return 1.0
    return min(_MAX_CORRECTION, max(1 / _MAX_CORRECTION, load.step_ms / said))


def prefill_s_per_token(
    seen: TrafficCounts, records: Sequence[WorkerRecord], prompt_tokens: float
) -> float | None:
    """Seconds of a prefill worker's engine for each token of a prompt, with what its cache spares.

    As seen, where enough was; otherwise what calibrations say of prompts of that length. None:
    nothing is known.
    """
    if seen.prefill_s >= _ENOUGH_S and seen.prefilled_tokens > 0:
        return seen.prefill_s / seen.prefilled_tokens
    known = [record.prefill_cost for record in records if any(record.prefill_cost)]
    if not known or prompt_tokens <= 0:
        return None
    each = [a + b * prompt_tokens + c * prompt_tokens * prompt_tokens / 2 for a, b, c in known]
    return sum(each) / len(each) / 1e3 / prompt_tokens
