"""OpenTelemetry spans of requests, sent by OTLP over gRPC if ``otlp_endpoint`` is set.

Tracing is off until ``start_tracing`` is called. While it is off, ``begin_span`` makes spans of
almost no cost.

    off ─start_tracing→ on ─end_tracing→ off

A process has one tracer. Spans may begin and end on any thread; a thread of the SDK sends them.
Spans beyond a full queue are dropped, and no request waits for a collector. The SDK's own settings
are its environment variables (``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_BSP_…``).

Attributes follow the semantic conventions for generative AI where these have one (``gen_ai.…``),
and are ``baton.…`` otherwise. None holds text of a prompt or an answer.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.errors import BatonError
from baton.extras import needs_extra
from baton.request import MAX_STATE, NO_TRACE, TraceContext

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

Attribute = str | bool | int | float
_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f][13579bdf]", re.ASCII)
_FLUSH_MS = 2000
"""Maximum time that an ending process waits for its last spans, in milliseconds."""


@dataclass(slots=True)
class _Tracing:
    """The state of tracing in this process."""

    tracer: trace.Tracer = field(default_factory=trace.NoOpTracer)
    provider: TracerProvider | None = None


_tracing = _Tracing()


def start_tracing(
    endpoint: str, service: str, instance: str, ratio: float, processor: SpanProcessor | None = None
) -> None:
    """Start sending spans to ``endpoint``, as ``service.name`` and ``service.instance.id``.

    Nothing happens if ``endpoint`` is empty. A traceparent decides whether its own request is
    traced. Of the requests without one, the fraction ``ratio`` is traced. ``processor`` takes the
    spans in place of an exporter. Raises RuntimeError if tracing is already on, and ConfigError
    without the extra ``otel``.
    """
    if not endpoint:
        return
    if _tracing.provider is not None:
        raise RuntimeError("tracing is on already")
    # Processes that trace nothing need not load the SDK.
    with needs_extra("otel", "otlp_endpoint"):
        from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import (  # noqa: PLC0415
            ParentBased,
            TraceIdRatioBased,
        )

    resource = Resource.create({"service.name": service, "service.instance.id": instance})
    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(ratio)), resource=resource, shutdown_on_exit=False
    )
    provider.add_span_processor(processor or _sender(endpoint))
    _tracing.provider, _tracing.tracer = provider, provider.get_tracer("baton")


def end_tracing() -> None:
    """Send the remaining spans within two seconds, and stop tracing; idempotent.

    The call blocks, so do not make it on an event loop.
    """
    provider = _tracing.provider
    _tracing.provider, _tracing.tracer = None, trace.NoOpTracer()
    if provider is not None:
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()


def check_tracing() -> None:
    """Check that the extra ``otel``, which sends spans, is installed. Raises ConfigError if it is
    not."""
    with needs_extra("otel", "otlp_endpoint"):
        import_module("opentelemetry.sdk.trace.export")
        import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")


def _sender(endpoint: str) -> SpanProcessor:
    check_tracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    # It logs each refused batch, about which an operator can do nothing.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TIMEOUT", "5")
    secure = endpoint.startswith("https://")
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint, insecure=not secure))


def begin_span(
    name: str,
    parent: TraceContext = NO_TRACE,
    *,
    kind: SpanKind = SpanKind.INTERNAL,
    began_at: float | None = None,
    attributes: Mapping[str, Attribute] | None = None,
) -> Span:
    """Begin a span that lasts until its ``end`` is called. ``began_at`` is a time of
    ``time.monotonic``; None means now.

    A ``parent`` that is not a valid W3C Trace Context is ignored.
    """
    if _tracing.provider is None:
        return trace.INVALID_SPAN
    headers = parent.headers
    if len(parent.tracestate) > MAX_STATE:
        del headers["tracestate"]
    return _tracing.tracer.start_span(
        name,
        _PROPAGATOR.extract(headers),
        kind=kind,
        attributes=attributes,
        start_time=None if began_at is None else wall_ns(began_at),
    )


def wall_ns(at: float) -> int:
    """Convert a time of ``time.monotonic`` to Unix nanoseconds."""
    return time.time_ns() - int((time.monotonic() - at) * 1e9)


def context_of(span: Span, other: TraceContext = NO_TRACE) -> TraceContext:
    """Return the trace context for children of this span; ``other`` if the span is not traced."""
    if not span.get_span_context().is_valid:
        return other
    headers: dict[str, str] = {}
    _PROPAGATOR.inject(headers, trace.set_span_in_context(span))
    return TraceContext(headers.get("traceparent", ""), headers.get("tracestate", ""))


def sampled_trace_id(traceparent: str) -> str:
    """Return the trace id of a traceparent whose trace is sampled, 32 hexadecimal digits. Empty if
    it is not sampled, or the text is no traceparent."""
    found = _SAMPLED.fullmatch(traceparent)
    return found[1] if found else ""


def trace_id_of(span: Span) -> str:
    """Return the trace id of a span, 32 hexadecimal digits; empty if the span is not recorded."""
    return f"{span.get_span_context().trace_id:032x}" if span.is_recording() else ""


def fail_span(span: Span, error: BaseException | None) -> None:
    """Mark a span as failed, with the error's code. ``error`` None means that the work was
    abandoned."""
    if not span.is_recording():
        return
    code = "aborted" if error is None else type(error).__name__
    if isinstance(error, BatonError):
        code = error.code or code
    span.set_attribute("error.type", code)
    span.set_status(Status(StatusCode.ERROR))
