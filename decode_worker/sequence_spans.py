"""Spans of the sequences that decode here, each from its first token here to its end."""

from __future__ import annotations

from opentelemetry.trace import Span

from baton.telemetry.tracing import Attribute, begin_span, fail_span, trace_id_of
from engine.scheduling.sequence import Sequence


class SequenceSpans:
    """Owned by the control loop."""

    def __init__(self, worker: str) -> None:
        """``worker`` is its slot."""
        self._worker = worker
        self._spans: dict[int, Span] = {}

    def begin(self, sequence: Sequence) -> None:
        """It joins the batch; of a prompt that is computed here, it is queued."""
        attributes: dict[str, Attribute] = {
            "baton.worker": self._worker,
            "baton.choice": sequence.choice,
        }
        span = begin_span("decode", sequence.spec.trace, attributes=attributes)
        if trace_id_of(span):
            self._spans[sequence.sequence_id] = span

    def end(self, sequence: Sequence, error: BaseException | None = None) -> None:
        """It has ended, well or with ``error``; idempotent."""
        span = self._spans.pop(sequence.sequence_id, None)
        if span is None:
            return
        span.set_attributes(
            {
                "gen_ai.usage.output_tokens": sequence.output_length,
                "baton.computed_prompt_tokens": sequence.computed_here,
                "baton.preemptions": sequence.preemptions,
            }
        )
        if sequence.finish_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [sequence.finish_reason.value])
        elif error is not None:
            fail_span(span, error)
        span.end()
