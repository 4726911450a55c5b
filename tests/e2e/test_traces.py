"""A request's spans at a real collector, its exemplar and its log lines, from a whole cluster."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.support.e2e.answers import end_by_sigkill
from tests.support.e2e.cluster import PATIENT, UpProcess

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
WORDS = "quixotic marmalade"
DEADLINE_S = 120.0


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps what it is sent, by the service that has sent it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._spans: list[tuple[str, Span]] = []

    def Export(  # noqa: N802 - gRPC's name
        self,
        request: trace_service_pb2.ExportTraceServiceRequest,
        context: grpc.ServicerContext,
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._lock:
            for resource in request.resource_spans:
                named = {a.key: a.value.string_value for a in resource.resource.attributes}
                for scope in resource.scope_spans:
                    self._spans += [(named["service.name"], span) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def trace(self, names: set[str]) -> dict[str, tuple[str, Span]]:
        """The trace's spans by name, once all of ``names`` are there."""
        until = time.monotonic() + DEADLINE_S
        while True:
            with self._lock:
                mine = [(s, span) for s, span in self._spans if span.trace_id.hex() == TRACE]
            found = {span.name: (service, span) for service, span in mine}
            if names <= found.keys() or time.monotonic() > until:
                return found
            time.sleep(0.1)


@pytest.fixture(scope="module")
def collector() -> Iterator[tuple[Collector, str]]:
    server = grpc.server(ThreadPoolExecutor(4))
    kept = Collector()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(kept, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield kept, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


def test_one_request_from_end_to_end(collector: tuple[Collector, str]) -> None:
    kept, endpoint = collector
    flags = ("--otlp-endpoint", endpoint, "--log-format", "json", "--local-prefill", "never")
    env = PATIENT | {"BATON_LOG_REQUESTS": "true", "OTEL_BSP_SCHEDULE_DELAY": "200"}
    with UpProcess(*flags, env=env) as up:
        up.wait_ready()
        answer = httpx.post(
            f"{up.http}/v1/chat/completions",
            json={
                "model": up.model,
                "messages": [{"role": "user", "content": WORDS}],
                "max_tokens": 4,
                "temperature": 0,
                "ignore_eos": True,
            },
            headers={"traceparent": f"00-{TRACE}-{CLIENT}-01"},
            timeout=DEADLINE_S,
        )
        assert answer.status_code == 200, answer.text
        top = f"chat {up.model}"
        spans = kept.trace({top, "admission", "attempt", "prefill", "handoff", "decode"})
        page = httpx.get(
            f"{up.http}/metrics",
            headers={"accept": "application/openmetrics-text; version=1.0.0"},
            timeout=DEADLINE_S,
        )
        logs = {path.name: path.read_text() for path in up.logs.iterdir()}
        end_by_sigkill(up)

    parents = {
        top: bytes.fromhex(CLIENT),
        "admission": spans[top][1].span_id,
        "attempt": spans[top][1].span_id,
        "prefill": spans["attempt"][1].span_id,
        "handoff": spans["prefill"][1].span_id,
        "decode": spans["handoff"][1].span_id,
    }
    assert {name: span.parent_span_id for name, (_, span) in spans.items()} == parents
    by_service = {name: service for name, (service, _) in spans.items()}
    assert by_service[top] == by_service["attempt"] == "baton-router"
    assert by_service["prefill"] == by_service["decode"] == "baton-worker"
    told = {a.key: a.value for a in spans[top][1].attributes}
    assert told["gen_ai.usage.output_tokens"].int_value == 4
    assert told["baton.outcome"].string_value == "ok"
    handoff = {a.key: a.value for a in spans["handoff"][1].attributes}
    assert handoff["baton.bytes"].int_value > 0
    assert WORDS not in str(spans), "no prompt is in a span"

    exemplars = [line for line in page.text.splitlines() if TRACE in line]
    assert exemplars
    assert all("time_to_first_token_seconds_bucket" in line for line in exemplars)

    router = next(text for name, text in logs.items() if name.startswith("router"))
    rows = [json.loads(line) for line in router.splitlines()]
    (ended,) = [row for row in rows if row["logger"] == "baton.requests"]
    assert ended["trace_id"] == TRACE
    assert ended["outcome"] == "ok"
    assert ended["output_tokens"] == 4
    assert not any(WORDS in text for text in logs.values()), "no prompt is in a log"
