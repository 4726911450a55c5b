"""The span of one request, from its receipt to its end: what all other spans of it are below.

Attributes by OpenTelemetry's semantic conventions for generative AI, where these have one.
"""

from __future__ import annotations

from opentelemetry.trace import SpanKind

from baton.errors import BatonError
from baton.telemetry.tracing import (
    Attribute,
    begin_span,
    context_of,
    fail_span,
    trace_id_of,
    wall_ns,
)
from router.core.request import GenerationRequest, OutputDelta


class RequestSpan:
    """Owned by the router's event loop; ``now`` is of ``time.monotonic``."""

    def __init__(self, request: GenerationRequest, context_class: str, received_at: float) -> None:
        operation = _operation(request)
        self._span = begin_span(
            f"{operation} {request.model}",
            request.trace,
            kind=SpanKind.SERVER,
            began_at=received_at,
            attributes=_asked(request, operation, context_class),
        )
        self.context = context_of(self._span, request.trace)
        """The parent of what is done for the request."""
        self.trace_id = trace_id_of(self._span)
        """Empty where it is not traced."""
        self._tokens = 0
        self._cached = 0
        self._reasons: list[str] = []

    def delta(self, delta: OutputDelta, now: float) -> None:
        """Something came of the workers."""
        if not self.trace_id:
            return
        if delta.token_ids and not self._tokens:
            self._span.add_event("first token", timestamp=wall_ns(now))
        self._tokens += len(delta.token_ids)
        self._cached += delta.cached_prompt_tokens
        if delta.finish_reason is not None:
            self._reasons.append(delta.finish_reason.value)

    def end(self, outcome: str, error: BatonError | None = None) -> None:
        """``outcome`` as in the metrics."""
        if not self.trace_id:
            return
        self._span.set_attributes(
            {
                "baton.outcome": outcome,
                "baton.cached_prompt_tokens": self._cached,
                "gen_ai.usage.output_tokens": self._tokens,
                "gen_ai.response.finish_reasons": self._reasons,
            }
        )
        if outcome != "ok":
            fail_span(self._span, error)
        self._span.end()


def _operation(request: GenerationRequest) -> str:
    if request.embeds:
        return "embeddings"
    return "chat" if request.chat else "text_completion"


def _asked(request: GenerationRequest, operation: str, context_class: str) -> dict[str, Attribute]:
    sampling = request.sampling
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "baton",
        "gen_ai.request.model": request.model,
        "gen_ai.response.model": request.model,
        "gen_ai.response.id": request.request_id,
        "gen_ai.usage.input_tokens": len(request.prompt_ids),
        "baton.context_class": context_class,
        "baton.tenant": request.principal.tenant,
    }
    if operation != "embeddings":
        attributes |= {
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": request.choices,
        }
    if request.session:
        attributes["gen_ai.conversation.id"] = request.session
    return attributes
