"""An OTLP receiver of traces and metrics over gRPC in this process, with or without TLS."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric
from opentelemetry.proto.trace.v1.trace_pb2 import Span

DEADLINE_S = 120.0


class OtlpReceiver(
    trace_service_pb2_grpc.TraceServiceServicer, metrics_service_pb2_grpc.MetricsServiceServicer
):
    """Keeps what it is sent. Each entry begins with the attributes of its resource."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.endpoint = ""
        self._spans: list[tuple[dict[str, str], Span]] = []
        self._metrics: list[tuple[dict[str, str], Metric]] = []
        self._headers: list[dict[str, str]] = []

    def Export(self, request, context):  # type: ignore[no-untyped-def] # noqa: N802
        with self._lock:
            pairs = context.invocation_metadata()
            self._headers.append({key: value for key, value in pairs if isinstance(value, str)})
            if isinstance(request, trace_service_pb2.ExportTraceServiceRequest):
                for spans in request.resource_spans:
                    about = texts(spans.resource.attributes)
                    self._spans += [
                        (about, one) for part in spans.scope_spans for one in part.spans
                    ]
                return trace_service_pb2.ExportTraceServiceResponse()
            for metrics in request.resource_metrics:
                about = texts(metrics.resource.attributes)
                self._metrics += [
                    (about, one) for part in metrics.scope_metrics for one in part.metrics
                ]
            return metrics_service_pb2.ExportMetricsServiceResponse()

    def spans(self) -> list[tuple[dict[str, str], Span]]:
        with self._lock:
            return list(self._spans)

    def metrics(self) -> list[tuple[dict[str, str], Metric]]:
        with self._lock:
            return list(self._metrics)

    def headers(self) -> list[dict[str, str]]:
        """The metadata of each call."""
        with self._lock:
            return list(self._headers)

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait until it is so, or too long."""
        end = time.monotonic() + DEADLINE_S
        while not holds() and time.monotonic() < end:
            time.sleep(0.05)


def texts(attributes: Iterable[KeyValue]) -> dict[str, str]:
    """The attributes whose value is a text."""
    return {one.key: one.value.string_value for one in attributes}


@contextmanager
def otlp_receiver(credentials: grpc.ServerCredentials | None = None) -> Iterator[OtlpReceiver]:
    """A receiver that listens on a port of its own; with ``credentials``, by TLS."""
    server = grpc.server(ThreadPoolExecutor(4))
    kept = OtlpReceiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)  # type: ignore[no-untyped-call]
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(kept, server)  # type: ignore[no-untyped-call]
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
        kept.endpoint = f"http://127.0.0.1:{port}"
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
        kept.endpoint = f"https://localhost:{port}"
    server.start()
    try:
        yield kept
    finally:
        server.stop(None).wait()
