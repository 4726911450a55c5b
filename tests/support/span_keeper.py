"""Spans of this process, kept where a test can look at them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanContext

from baton.config.cluster import Config
from baton.telemetry.logs import Service
from baton.telemetry.tracing import end_tracing, start_tracing


class SpanKeeper:
    """What was traced."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def all(self) -> list[ReadableSpan]:
        """Those that have ended, in this order."""
        return list(self._exporter.get_finished_spans())

    def one(self, name: str) -> ReadableSpan:
        """The only one of a name."""
        (found,) = [span for span in self.all() if span.name == name]
        return found


def identity(span: ReadableSpan) -> SpanContext:
    """Its trace and its own id."""
    found = span.get_span_context()
    assert found is not None
    return found


@contextmanager
def kept_spans(ratio: float = 1.0, client_trace_rate: float = 10.0) -> Iterator[SpanKeeper]:
    """Tracing is on within, and sends nothing."""
    exporter = InMemorySpanExporter()
    config = Config(
        otlp_endpoint="http://127.0.0.1:9",
        trace_ratio=ratio,
        client_trace_rate=client_trace_rate,
    )
    start_tracing(config, Service.ROUTER, "0", "tests", SimpleSpanProcessor(exporter))
    try:
        yield SpanKeeper(exporter)
    finally:
        end_tracing()
