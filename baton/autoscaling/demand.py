"""From what routers and workers tell to what the autoscaler is told. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.autoscaling.cluster_figures import Demand, SloFigures
from baton.autoscaling.traffic_counts import TrafficCounts
from baton.autoscaling.traffic_flow import Traffic
from baton.autoscaling.worker_capacity import decode_capacity, prefill_s_per_token
from baton.store.registry import WorkerRecord

_SEEN_KEPT = 0.8
"""Of what was seen of prefill workers, at each look: so that a moment does not decide."""


class DemandReader:
    """Keeps what was seen of the workers' pace. Owned by whoever looks."""

    def __init__(self, slo_tpot_s: float) -> None:
        self._slo_tpot_s = slo_tpot_s
        self._seen = TrafficCounts()
        """What says something of prefill workers and of lengths; older looks count less."""

    def read(self, traffic: Traffic, records: Sequence[WorkerRecord]) -> Demand:
        """``records`` of the workers that serve."""
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
        """Tokens that a sequence attends to: of those that run, else of the prompts that came."""
        running = sum(record.load.running for record in decoding)
        held = sum(record.load.context_tokens for record in decoding)
        return held / running if running else self._prompt_tokens()
