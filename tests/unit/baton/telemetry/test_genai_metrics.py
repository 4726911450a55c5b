"""Metrics of requests by OpenTelemetry's conventions, as an OTLP receiver gets them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import HistogramDataPoint

from baton.config.cluster import Config
from baton.telemetry.genai_metrics import GenAiMetrics, ServedRequest
from baton.telemetry.logs import Service
from baton.telemetry.tracing import begin_span, end_tracing, start_tracing
from tests.support.certificates import Authority
from tests.support.otlp_receiver import OtlpReceiver, otlp_receiver, texts

ENDED = ServedRequest(
    operation="chat",
    model="smollm2",
    duration_s=2.0,
    input_tokens=100,
    output_tokens=5,
    first_token_s=0.5,
    per_token_s=0.375,
    error="",
)
SHARED = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "baton",
    "gen_ai.request.model": "smollm2",
    "gen_ai.response.model": "smollm2",
}


def points(receiver: OtlpReceiver, name: str) -> list[tuple[dict[str, str], HistogramDataPoint]]:
    found = [metric for _, metric in receiver.metrics() if metric.name == name]
    return [
        (texts(one.attributes), one) for metric in found for one in metric.histogram.data_points
    ]


def sent(receiver: OtlpReceiver, requests: Iterable[ServedRequest]) -> None:
    config = Config(otlp_endpoint=receiver.endpoint)
    metrics = GenAiMetrics.start(config, Service.ROUTER, "router-0@host", "blue")
    assert metrics is not None
    for one in requests:
        metrics.record(one)
    metrics.close()


def test_a_receiver_gets_names_attributes_and_buckets_of_the_conventions() -> None:
    with otlp_receiver() as receiver:
        sent(receiver, [ENDED])
        about = [resource for resource, _ in receiver.metrics()]
        units = {metric.name: metric.unit for _, metric in receiver.metrics()}
        ((duration_of, duration),) = points(receiver, "gen_ai.server.request.duration")
        ((first_of, first),) = points(receiver, "gen_ai.server.time_to_first_token")
        ((each_of, each),) = points(receiver, "gen_ai.server.time_per_output_token")
        usage = points(receiver, "baton.token.usage")
    assert all(one["service.name"] == "baton-router" for one in about)
    assert all(one["service.instance.id"] == "router-0@host" for one in about)
    assert all(one["baton.cluster"] == "blue" for one in about)
    assert units == {
        "gen_ai.server.request.duration": "s",
        "gen_ai.server.time_to_first_token": "s",
        "gen_ai.server.time_per_output_token": "s",
        "baton.token.usage": "{token}",
    }
    assert duration_of == first_of == each_of == SHARED
    assert (duration.sum, first.sum, each.sum) == (2.0, 0.5, 0.375)
    assert list(duration.explicit_bounds)[:4] == [0.01, 0.02, 0.04, 0.08]
    assert duration.explicit_bounds[-1] == 81.92
    assert first.explicit_bounds[0] == 0.001
    assert first.explicit_bounds[-1] == 10.0
    assert each.explicit_bounds[-1] == 2.5
    by_type = {told["gen_ai.token.type"]: one for told, one in usage}
    assert {kind: one.sum for kind, one in by_type.items()} == {"input": 100, "output": 5}
    assert list(by_type["input"].explicit_bounds) == [4.0**power for power in range(14)]


def test_a_failed_request_has_its_error_and_no_latencies_of_tokens() -> None:
    failed = replace(
        ENDED, error="worker_failed", first_token_s=None, per_token_s=None, output_tokens=0
    )
    with otlp_receiver() as receiver:
        sent(receiver, [failed])
        ((told, _),) = points(receiver, "gen_ai.server.request.duration")
        names = {metric.name for _, metric in receiver.metrics()}
        usage = [told["gen_ai.token.type"] for told, _ in points(receiver, "baton.token.usage")]
    assert told == SHARED | {"error.type": "worker_failed"}
    assert "gen_ai.server.time_to_first_token" not in names
    assert "gen_ai.server.time_per_output_token" not in names
    assert usage == ["input"]


def test_the_standard_variables_give_certificates_and_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    server, client = authority.sign("server"), authority.sign("client")
    assert server.key is not None
    assert server.certificate is not None
    credentials = grpc.ssl_server_credentials(
        [(server.key.read_bytes(), server.certificate.read_bytes())],
        authority.certificate.read_bytes(),
        require_client_auth=True,
    )
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(authority.certificate))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", str(client.certificate))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CLIENT_KEY", str(client.key))
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-scope-orgid=blue")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod")
    with otlp_receiver(credentials) as receiver:
        start_tracing(
            Config(otlp_endpoint=receiver.endpoint), Service.ROUTER, "router-0@host", "blue"
        )
        try:
            begin_span("chat").end()
        finally:
            end_tracing()
        sent(receiver, [ENDED])
        ((traced, _),) = receiver.spans()
        (measured, *_) = (resource for resource, _ in receiver.metrics())
        headers = receiver.headers()
    assert len(headers) >= 2, "of spans and of metrics"
    assert {one["x-scope-orgid"] for one in headers} == {"blue"}
    assert traced["deployment.environment.name"] == "prod"
    assert measured["deployment.environment.name"] == "prod"


def test_off_without_an_endpoint_or_by_the_standard_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert GenAiMetrics.start(Config(), Service.ROUTER, "router-0", "blue") is None
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    config = Config(otlp_endpoint="http://127.0.0.1:9")
    assert GenAiMetrics.start(config, Service.ROUTER, "router-0", "blue") is None
