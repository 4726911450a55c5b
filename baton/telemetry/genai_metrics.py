"""OpenTelemetry metrics of requests, sent by OTLP over gRPC if ``otlp_endpoint`` is set.

Names, attributes and buckets are those of the semantic conventions for generative AI. They define
no token usage of servers, so that metric has a name of Baton.

A thread of the SDK sends them every 60 s (``OTEL_METRIC_EXPORT_INTERVAL``, in milliseconds), and
once at the end. ``OTEL_METRICS_EXPORTER=none`` switches them off, for collectors of traces alone.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from baton.config.cluster import Config
from baton.extras import needs_extra
from baton.telemetry.logs import Service
from baton.telemetry.tracing import PROVIDER, is_secure, prepare_exporters, resource_of

if TYPE_CHECKING:
    from opentelemetry.metrics import Histogram
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import MetricReader

_DURATION = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
    *(0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
)
_PER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_TOKENS = tuple(4**power for power in range(14))
_END_MS = 2000
"""Maximum time that an ending process waits for its last metrics, in milliseconds."""


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """What the metrics need to know of a request that has ended. Times are in seconds."""

    operation: str
    """The ``gen_ai.operation.name``."""
    model: str
    duration_s: float
    input_tokens: int
    output_tokens: int
    first_token_s: float | None
    """Time to the first token; None unless the request ended well with a token."""
    per_token_s: float | None
    """Time per output token after the first; None unless the request ended well with two."""
    error: str
    """Code of the error, ``aborted`` if the client has left, empty if the request ended well."""


class GenAiMetrics:
    """The OpenTelemetry metrics of one router process."""

    def __init__(self, provider: MeterProvider) -> None:
        self._provider = provider
        meter = provider.get_meter("baton")

        def histogram(name: str, unit: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return meter.create_histogram(
                name, unit, text, explicit_bucket_boundaries_advisory=buckets
            )

        self._duration = histogram(
            "gen_ai.server.request.duration", "s", "Time from receipt to the end.", _DURATION
        )
        self._first_token = histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "Time from receipt to the first token of requests that ended well.",
            _FIRST_TOKEN,
        )
        self._per_token = histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per output token after the first, of requests that ended well.",
            _PER_TOKEN,
        )
        self._tokens = histogram(
            "baton.token.usage", "{token}", "Input and output tokens of a request.", _TOKENS
        )

    @classmethod
    def start(
        cls,
        config: Config,
        service: Service,
        instance: str,
        cluster_id: str,
        reader: MetricReader | None = None,
    ) -> Self | None:
        """Return metrics that are sent to the configured ``otlp_endpoint``; None if it is empty or
        ``OTEL_METRICS_EXPORTER`` is ``none``.

        The arguments are those of ``start_tracing``. ``reader`` reads the metrics in place of an
        exporter. Raises ConfigError without the extra ``otel``.
        """
        if not config.otlp_endpoint or os.environ.get("OTEL_METRICS_EXPORTER") == "none":
            return None
        with needs_extra("otel", "otlp_endpoint"):
            from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415

        provider = MeterProvider(
            [reader or _sender(config.otlp_endpoint)],
            resource=resource_of(service, instance, cluster_id),
            shutdown_on_exit=False,
        )
        return cls(provider)

    def record(self, ended: ServedRequest) -> None:
        """Record a request that has ended."""
        shared: dict[str, str] = {
            "gen_ai.operation.name": ended.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": ended.model,
            "gen_ai.response.model": ended.model,
        }
        failed = {"error.type": ended.error} if ended.error else {}
        self._duration.record(ended.duration_s, shared | failed)
        self._tokens.record(ended.input_tokens, shared | {"gen_ai.token.type": "input"})
        if ended.output_tokens:
            self._tokens.record(ended.output_tokens, shared | {"gen_ai.token.type": "output"})
        if ended.first_token_s is not None:
            self._first_token.record(ended.first_token_s, shared)
        if ended.per_token_s is not None:
            self._per_token.record(ended.per_token_s, shared)

    def close(self) -> None:
        """Send the last metrics within two seconds, and stop.

        The call blocks, so do not make it on an event loop.
        """
        self._provider.shutdown(_END_MS)


def _sender(endpoint: str) -> MetricReader:
    with needs_extra("otel", "otlp_endpoint"):
        from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import (  # noqa: PLC0415
            OTLPMetricExporter,
        )
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader  # noqa: PLC0415

    prepare_exporters()
    exporter = OTLPMetricExporter(endpoint=endpoint, insecure=not is_secure(endpoint))
    return PeriodicExportingMetricReader(exporter)
