"""A request's spans at a real collector, its exemplar and its log lines, from a whole cluster."""

from __future__ import annotations

import json
from socket import gethostname

import httpx
import pytest

from tests.support.e2e.answers import end_by_sigkill
from tests.support.e2e.cluster import PATIENT, UpProcess
from tests.support.otlp_receiver import otlp_receiver

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT = "b7ad6b7169203331"
WORDS = "quixotic marmalade"
DEADLINE_S = 120.0


@pytest.mark.long
def test_one_request_from_end_to_end() -> None:
    env = PATIENT | {
        "BATON_LOG_REQUESTS": "true",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
        "OTEL_METRIC_EXPORT_INTERVAL": "500",
    }
    flags = ("--log-format", "json", "--local-prefill", "never")
    with (
        otlp_receiver() as kept,
        UpProcess("--otlp-endpoint", kept.endpoint, *flags, env=env) as up,
    ):
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
            headers={"traceparent": f"00-{TRACE}-{CLIENT}-01", "x-request-id": "mine"},
            timeout=DEADLINE_S,
        )
        assert answer.status_code == 200, answer.text
        top = f"chat {up.model}"
        names = {top, "admission", "attempt", "prefill", "handoff", "decode"}
        kept.until(lambda: names <= {span.name for _, span in kept.spans()})
        kept.until(lambda: "baton.token.usage" in {metric.name for _, metric in kept.metrics()})
        spans = {
            span.name: (resource["service.name"], span)
            for resource, span in kept.spans()
            if span.trace_id.hex() == TRACE
        }
        measured = {metric.name: metric for _, metric in kept.metrics()}
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
    assert told["baton.request_id"].string_value == "mine"
    handoff = {a.key: a.value for a in spans["handoff"][1].attributes}
    assert handoff["baton.bytes"].int_value > 0
    assert WORDS not in str(spans), "no prompt is in a span"

    (first,) = measured["gen_ai.server.time_to_first_token"].histogram.data_points
    assert first.count == 1
    usage = measured["baton.token.usage"].histogram.data_points
    assert sorted(point.sum for point in usage)[0] == 4

    exemplars = [line for line in page.text.splitlines() if TRACE in line]
    assert exemplars
    assert all("time_to_first_token_seconds_bucket" in line for line in exemplars)

    router = next(text for name, text in logs.items() if name.startswith("router"))
    rows = [json.loads(line) for line in router.splitlines()]
    (ended,) = [row for row in rows if row["logger"] == "baton.requests"]
    assert ended["trace_id"] == TRACE
    assert ended["request_id"] == "mine"
    assert ended["answer_id"] == answer.json()["id"]
    router = f"router-0@{gethostname()}"
    assert (ended["service"], ended["instance"]) == ("baton-router", router)
    assert ended["outcome"] == "ok"
    assert ended["output_tokens"] == 4
    assert not any(WORDS in text for text in logs.values()), "no prompt is in a log"
