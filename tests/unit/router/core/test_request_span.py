"""What a request's span, its log line and its histogram's exemplar say; and what they do not."""

from __future__ import annotations

import io
import json
import logging
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from baton.config.cluster import Config
from baton.errors import BatonError, Overloaded
from baton.request import FinishReason, Principal, TraceContext
from baton.sampling_params import SamplingParams
from baton.store.registry import WorkerRecord
from baton.telemetry.logs import Service, formatter, of_request
from baton.telemetry.metrics import RouterMetrics
from router.access.api_keys import Caller
from router.core.accounting import RequestStats
from router.core.request import GenerationRequest, OutputDelta, Relay, choices_for
from router.inference.builder import Arrival
from tests.support.router.front_fakes import MODEL, service_of, tiny_tokenizer
from tests.support.span_keeper import SpanKeeper, identity, kept_spans

TRACE = "0af7651916cd43dd8448eb211c80319c"
REQUEST = GenerationRequest(
    "chatcmpl-1",
    (1, 2, 3),
    SamplingParams(seed=1, max_tokens=8, temperature=0.5),
    Principal("acme", "key"),
    60.0,
    chat=True,
    model="smollm2",
    trace=TraceContext(f"00-{TRACE}-b7ad6b7169203331-01"),
)


class Workers:
    """Answers every request with two deltas, or fails as given."""

    context_length = 100

    def __init__(self, error: BatonError | None = None) -> None:
        self.error = error
        self.seen: list[GenerationRequest] = []

    def check_place(self, tenant: str, priority: int) -> None:
        """There is always a place."""

    async def generate(
        self, request: GenerationRequest, relay: Relay | None = None
    ) -> AsyncIterator[OutputDelta]:
        self.seen.append(request)
        if self.error is not None:
            raise self.error
        yield OutputDelta("secret ", (5,), None, cached_prompt_tokens=2)
        yield OutputDelta("answer", (6, 7), FinishReason.STOP)

    def health(self) -> tuple[str, str]:
        return "ok", ""

    def metrics_addresses(self) -> list[str]:
        return []

    def worker_records(self) -> list[WorkerRecord]:
        return []


@pytest.fixture
def spans() -> Iterator[SpanKeeper]:
    with kept_spans() as kept:
        yield kept


async def deliver(
    workers: Workers, config: Config | None = None, request: GenerationRequest = REQUEST
) -> RouterMetrics:
    metrics = RouterMetrics(CollectorRegistry())
    stats = RequestStats(metrics)
    service = service_of(workers, tiny_tokenizer(), MODEL, stats, config or Config())
    arrival = Arrival("chatcmpl-1", time.monotonic(), 60.0, Caller(Principal("acme", "key"), None))

    async def sink(_: int, __: OutputDelta) -> None: ...

    try:
        await service.run(arrival, [request], choices_for([request]), sink)
    except BatonError:
        assert workers.error is not None
    return metrics


def page_of(metrics: RouterMetrics) -> str:
    draw, _ = choose_encoder("application/openmetrics-text; version=1.0.0")
    return draw(metrics.registry).decode()


async def test_the_span_of_an_answer(spans: SpanKeeper) -> None:
    workers = Workers()
    await deliver(workers)
    span = spans.one("chat smollm2")
    told = dict(span.attributes or {})
    assert f"{identity(span).trace_id:032x}" == TRACE
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.request.model"] == "smollm2"
    assert told["gen_ai.request.temperature"] == 0.5
    assert told["gen_ai.usage.input_tokens"] == 3
    assert told["gen_ai.usage.output_tokens"] == 3
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert told["gen_ai.response.id"] == "chatcmpl-1"
    assert told["baton.cached_prompt_tokens"] == 2
    assert told["baton.outcome"] == "ok"
    assert [event.name for event in span.events] == ["first token"]
    assert "secret" not in str(told)
    (seen,) = workers.seen
    own = f"{identity(span).span_id:016x}"
    assert seen.trace.traceparent == f"00-{TRACE}-{own}-01", "workers' spans are below it"


async def test_the_span_has_the_clients_ids_within_bounds(spans: SpanKeeper) -> None:
    with of_request(request_id="mine"):
        await deliver(Workers(), request=replace(REQUEST, session="s" * 5000))
    told = dict(spans.one("chat smollm2").attributes or {})
    assert told["baton.request_id"] == "mine"
    assert told["gen_ai.conversation.id"] == "s" * 256


async def test_a_client_cannot_have_all_of_its_requests_traced() -> None:
    with kept_spans(ratio=0.0, client_trace_rate=0.0) as spans:
        workers = Workers()
        await deliver(workers)
        assert spans.all() == []
        (seen,) = workers.seen
        assert seen.trace.traceparent.endswith("-00"), "workers do not trace it either"


async def test_the_span_of_a_refusal(spans: SpanKeeper) -> None:
    await deliver(Workers(Overloaded("full")))
    told = dict(spans.one("chat smollm2").attributes or {})
    assert told["baton.outcome"] == "shed"
    assert told["error.type"] == Overloaded("full").code


async def test_the_histogram_names_a_trace(spans: SpanKeeper) -> None:
    metrics = await deliver(Workers())
    page = page_of(metrics)
    (line,) = [row for row in page.splitlines() if f'trace_id="{TRACE}"' in row]
    assert line.startswith("baton_time_to_first_token_seconds_bucket")


async def test_without_tracing_there_is_no_exemplar() -> None:
    metrics = await deliver(Workers())
    assert "trace_id" not in page_of(metrics)


@pytest.mark.parametrize("wanted", ["nothing", "requests", "prompts"])
async def test_the_log_line(wanted: str, spans: SpanKeeper) -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter("json", Service.ROUTER, "router-0"))
    logger = logging.getLogger("baton.requests")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    try:
        config = Config(log_requests=wanted == "requests", log_prompts=wanted == "prompts")
        with of_request(request_id="mine"):
            await deliver(Workers(), config)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    if wanted == "nothing":
        assert stream.getvalue() == ""
        return
    line = json.loads(stream.getvalue())
    assert (line["request_id"], line["answer_id"]) == ("mine", "chatcmpl-1")
    assert line["trace_id"] == TRACE
    assert (line["prompt_tokens"], line["output_tokens"]) == (3, 3)
    assert (line["outcome"], line["class"], line["tenant"]) == ("ok", "short", "acme")
    assert line["ttft_ms"] >= 0
    assert line["e2el_ms"] >= line["ttft_ms"]
    prompt = tiny_tokenizer().decode(REQUEST.prompt_ids) if wanted == "prompts" else None
    assert line.get("prompt") == prompt
    assert "secret" not in stream.getvalue()
