"""OpenTelemetry spans of requests, sent by OTLP over gRPC if ``otlp_endpoint`` is set.

Tracing is off until ``start_tracing`` is called. While it is off, ``begin_span`` makes spans of
almost no cost.

    off ─start_tracing→ on ─end_tracing→ off

A client may ask for a trace of its request by the sampled flag of its traceparent. A router honors
that for a bounded number of requests per second (``client_trace``).

A process has one tracer. Spans may begin and end on any thread; a thread of the SDK sends them.
Spans beyond a full queue are dropped, and no request waits for a collector. The SDK's own settings
are its environment variables (``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_BSP_…``).

Attributes follow the semantic conventions for generative AI where these have one (``gen_ai.…``),
and are ``baton.…`` otherwise. None holds text of a prompt or an answer.
"""

from __future__ import annotations

import logging
import os
import random
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from baton.config.cluster import Config
from baton.errors import BatonError
from baton.extras import needs_extra
from baton.request import MAX_STATE, NO_TRACE, TraceContext
from baton.telemetry.logs import Service

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

Attribute = str | bool | int | float
PROVIDER = "baton"
"""The ``gen_ai.provider.name``."""
_PROPAGATOR = TraceContextTextMapPropagator()
_SAMPLED = re.compile(r"00-([0-9a-f]{32})-[0-9a-f]{16}-[0-9a-f][13579bdf]", re.ASCII)
_FLUSH_MS = 2000
"""Maximum time that an ending process waits for its last spans, in milliseconds."""


@dataclass(slots=True)
class _Tracing:
    """The state of tracing in this process."""

    tracer: trace.Tracer = field(default_factory=trace.NoOpTracer)
    provider: TracerProvider | None = None
    clients: ClientTraces | None = None


class ClientTraces:
    """Bounds the traces that clients request, which cost as much as those of ``trace_ratio``."""

    def __init__(
        self,
        per_s: float,
        ratio: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """``per_s`` requests per second are traced as their client requests, and as many at once;
        of further ones the fraction ``ratio``. ``draw`` returns a random number below 1."""
        self._per_s, self._ratio = per_s, ratio
        self._clock, self._draw = clock, draw
        self._left, self._at = max(1.0, per_s), clock()

    def bounded(self, context: TraceContext) -> TraceContext:
        """Return the context of a client's request, without the sampled flag if the request is not
        to be traced."""
        if not sampled_trace_id(context.traceparent):
            return context
        now = self._clock()
        self._left = min(max(1.0, self._per_s), self._left + (now - self._at) * self._per_s)
        self._at = now
        if self._per_s and self._left >= 1:
            self._left -= 1
            return context
        # The trace's id cannot decide: the client has chosen it.
        if self._draw() < self._ratio:
            return context
        return TraceContext(f"{context.traceparent[:-2]}00", context.tracestate)


_tracing = _Tracing()


def start_tracing(
    config: Config,
    service: Service,
    instance: str,
    cluster_id: str,
    processor: SpanProcessor | None = None,
) -> None:
    """Start sending spans to the configured ``otlp_endpoint``.

    Nothing happens if it is empty. ``service``, ``instance`` and ``cluster_id`` are attributes of
    the spans' resource. A traceparent decides whether its own span is sampled; of the spans without
    one, the fraction ``trace_ratio`` is. ``processor`` takes the spans in place of an exporter.
    Raises RuntimeError if tracing is already on, and ConfigError without the extra ``otel``.
    """
    if not config.otlp_endpoint:
        return
    if _tracing.provider is not None:
        raise RuntimeError("tracing is on already")
    # Processes that trace nothing need not load the SDK.
    with needs_extra("otel", "otlp_endpoint"):
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.sampling import (  # noqa: PLC0415
            ParentBased,
            TraceIdRatioBased,
        )

    provider = TracerProvider(
        sampler=ParentBased(TraceIdRatioBased(config.trace_ratio)),
        resource=resource_of(service, instance, cluster_id),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor or _sender(config.otlp_endpoint))
    _tracing.provider, _tracing.tracer = provider, provider.get_tracer("baton")
    _tracing.clients = ClientTraces(config.client_trace_rate, config.trace_ratio)


def end_tracing() -> None:
    """Send the remaining spans within two seconds, and stop tracing; idempotent.

    The call blocks, so do not make it on an event loop.
    """
    provider = _tracing.provider
    _tracing.provider, _tracing.tracer, _tracing.clients = None, trace.NoOpTracer(), None
    if provider is not None:
        provider.force_flush(_FLUSH_MS)
        provider.shutdown()


def check_tracing() -> None:
    """Check that the extra ``otel``, which sends spans, is installed. Raises ConfigError if it is
    not."""
    with needs_extra("otel", "otlp_endpoint"):
        import_module("opentelemetry.sdk.trace.export")
        import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")


def resource_of(service: Service, instance: str, cluster_id: str) -> Resource:
    """Return the resource of this process's spans and metrics. The standard variables
    ``OTEL_RESOURCE_ATTRIBUTES`` add attributes."""
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415

    return Resource.create(
        {
            "service.name": service.value,
            "service.instance.id": instance,
            "baton.cluster": cluster_id,
        }
    )


def is_secure(endpoint: str) -> bool:
    """Return whether the connection to an OTLP endpoint uses TLS."""
    return endpoint.startswith("https://")


def prepare_exporters() -> None:
    """Set what all OTLP exporters of this process share."""
    # They log each refused batch, about which an operator can do nothing.
    logging.getLogger("opentelemetry.exporter").setLevel(logging.ERROR)
    os.environ.setdefault("OTEL_EXPORTER_OTLP_TIMEOUT", "5")


def _sender(endpoint: str) -> SpanProcessor:
    check_tracing()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import (  # noqa: PLC0415
        OTLPSpanExporter,
    )
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    prepare_exporters()
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=not is_secure(endpoint))
    return BatchSpanProcessor(exporter)


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


def client_trace(context: TraceContext) -> TraceContext:
    """Return the trace context of a client's request, as ``ClientTraces`` bounds it. While tracing
    is off, it is unchanged."""
    return context if _tracing.clients is None else _tracing.clients.bounded(context)


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
