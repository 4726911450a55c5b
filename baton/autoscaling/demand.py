"""The autoscaler's view of demand: the traffic, and the capacity of one worker of each role. Pure.

A worker's capacity follows from the cost of its steps. The cost is the worker's own calibration,
corrected by observed steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from baton.autoscaling.cluster_figures import Demand, SloFigures
from baton.autoscaling.traffic import TrafficCounts, TrafficWindow
from baton.store.registry import WorkerRecord

_SEEN_KEPT = 0.8
"""Factor by which each look at the cluster multiplies the weight of earlier observations of prefill
workers."""
_MAX_CORRECTION = 4.0
"""Maximum ratio between observed and calibrated step times, either way. A larger ratio reflects the
moment more than the worker."""
_ENOUGH_S = 0.5
"""Minimum engine seconds of prefill before observations replace calibration."""
_MIN_CONTEXT = 1.0


class DemandReader:
    """Computes the autoscaler's demand from traffic and worker records.

    It remembers the observed speed of prefill workers. Owned by the caller of ``read``.
    """

    def __init__(self, slo_tpot_s: float) -> None:
        self._slo_tpot_s = slo_tpot_s
        self._seen = TrafficCounts()
        """Observations of prefill workers and of prompt and answer lengths. Older observations have
        less weight."""

    def read(self, traffic: TrafficWindow, records: Sequence[WorkerRecord]) -> Demand:
        """Return the demand in the window ``traffic``. ``records`` are those of the workers that
        serve."""
        counts, seconds = traffic.counts, traffic.seconds
        self._remember(counts)
        decoding = [record for record in records if record.role == "decode"]
        capacity = decode_capacity(decoding or records, self._context(decoding), self._slo_tpot_s)
        return Demand(
            seconds=seconds,
            input_tokens_per_s=counts.input_tokens / seconds,
            output_tokens_per_s=counts.expected_tokens / seconds,
            prefill_s_per_token=prefill_s_per_token(self._seen, records, self._prompt_tokens()),
            decode_tokens_per_s=None if capacity is None else capacity.tokens_per_s,
            decode_batch=0.0 if capacity is None else capacity.batch,
            decode_sequences=sum(one.load.running + one.load.waiting for one in decoding),
            ttft=SloFigures(
                counts.first_tokens + counts.shed,
                counts.late_first_tokens + counts.shed,
                counts.tight_first_tokens + counts.shed,
            ),
            tpot=SloFigures(counts.answers, counts.slow_answers, counts.tight_answers),
        )

    def _remember(self, counts: TrafficCounts) -> None:
        if not counts.requests:
            return
        for name in ("requests", "input_tokens", "prefilled_tokens", "prefill_s"):
            setattr(
                self._seen, name, _SEEN_KEPT * getattr(self._seen, name) + getattr(counts, name)
            )

    def _prompt_tokens(self) -> float:
        return self._seen.input_tokens / self._seen.requests if self._seen.requests else 0.0

    def _context(self, decoding: Sequence[WorkerRecord]) -> float:
        """Return the mean number of context tokens of the running sequences; if there are none, the
        mean number of prompt tokens."""
        running = sum(record.load.running for record in decoding)
        held = sum(record.load.context_tokens for record in decoding)
        return held / running if running else self._prompt_tokens()


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """The capacity of one decode worker within the TPOT SLO."""

    batch: float
    """Number of sequences that a worker can run while a decode step takes at most the TPOT SLO."""
    tokens_per_s: float
    """Output tokens per second of a worker that runs ``batch`` sequences."""


def decode_capacity(
    records: Sequence[WorkerRecord], context_tokens: float, slo_tpot_s: float
) -> DecodeCapacity | None:
    """Return the mean capacity of decode workers whose sequences have ``context_tokens`` tokens
    each; None: unknown."""
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
    """Return the ratio of the observed time of the worker's latest steps to their calibrated
    time."""
    load = record.load
    a, b, c = record.step_cost
    said = a + b * load.step_batch + c * load.step_context_tokens
    if not load.step_ms or said <= 0:
        return 1.0
    return min(_MAX_CORRECTION, max(1 / _MAX_CORRECTION, load.step_ms / said))


def prefill_s_per_token(
    seen: TrafficCounts, records: Sequence[WorkerRecord], prompt_tokens: float
) -> float | None:
    """Return engine seconds of a prefill worker per prompt token, cached tokens included.

    The value is measured once there is enough engine time. Before that it comes from the
    calibration, for prompts of ``prompt_tokens``. None: unknown.
    """
    if seen.prefill_s >= _ENOUGH_S and seen.prefilled_tokens > 0:
        return seen.prefill_s / seen.prefilled_tokens
    known = [record.prefill_cost for record in records if any(record.prefill_cost)]
    if not known or prompt_tokens <= 0:
        return None
    each = [a + b * prompt_tokens + c * prompt_tokens * prompt_tokens / 2 for a, b, c in known]
    return sum(each) / len(each) / 1e3 / prompt_tokens
