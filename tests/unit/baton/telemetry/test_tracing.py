"""Spans have the given parents, and cost nothing where tracing is off."""

from __future__ import annotations

import time

import pytest
from opentelemetry.trace import INVALID_SPAN, StatusCode

from baton.config.cluster import Config
from baton.errors import Overloaded
from baton.request import NO_TRACE, TraceContext
from baton.telemetry.logs import Service
from baton.telemetry.tracing import (
    ClientTraces,
    begin_span,
    client_trace,
    context_of,
    end_tracing,
    fail_span,
    sampled_trace_id,
    start_tracing,
    trace_id_of,
)
from tests.support.span_keeper import identity, kept_spans

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
CLIENT = TraceContext(f"00-{TRACE}-{SPAN}-01", "vendor=1")


def test_off_there_are_no_spans_and_a_clients_context_goes_through() -> None:
    start_tracing(Config(), Service.ROUTER, "0", "c")
    assert client_trace(CLIENT) == CLIENT
    span = begin_span("work", CLIENT)
    assert span is INVALID_SPAN
    assert trace_id_of(span) == ""
    assert context_of(span, CLIENT) == CLIENT
    fail_span(span, None)
    span.end()
    end_tracing()


def test_a_span_is_a_child_of_the_given_one() -> None:
    with kept_spans() as spans:
        outer = begin_span("outer", CLIENT, began_at=time.monotonic() - 10.0)
        inner = begin_span("inner", context_of(outer), attributes={"n": 1})
        assert trace_id_of(inner) == TRACE
        inner.end()
        outer.end()
        told, below = spans.one("outer"), spans.one("inner")
    assert told.parent is not None
    assert f"{told.parent.span_id:016x}" == SPAN
    assert below.parent is not None
    assert below.parent.span_id == identity(told).span_id
    assert below.attributes == {"n": 1}
    assert context_of(outer).tracestate == "vendor=1", "vendors' own words are passed on"
    assert told.end_time is not None
    assert told.start_time is not None
    assert 9e9 < told.end_time - told.start_time < 20e9


@pytest.mark.parametrize(
    "parent",
    [NO_TRACE, TraceContext("nonsense"), TraceContext(f"00-{'0' * 32}-{SPAN}-01", "a=b")],
)
def test_a_context_that_is_none_begins_a_trace(parent: TraceContext) -> None:
    with kept_spans() as spans:
        begin_span("work", parent).end()
        assert spans.one("work").parent is None


def test_a_long_tracestate_is_dropped() -> None:
    with kept_spans():
        span = begin_span("work", TraceContext(CLIENT.traceparent, "v=" + "x" * 600))
        assert trace_id_of(span) == TRACE
        assert context_of(span).tracestate == ""
        span.end()


def test_the_ratio_counts_where_the_client_says_nothing() -> None:
    with kept_spans(ratio=0.0) as spans:
        begin_span("mine").end()
        unwanted = begin_span("unwanted", TraceContext(f"00-{TRACE}-{SPAN}-00"))
        assert trace_id_of(unwanted) == ""
        unwanted.end()
        begin_span("wanted", CLIENT).end()
        assert [span.name for span in spans.all()] == ["wanted"]


def test_failures_have_the_errors_code() -> None:
    with kept_spans() as spans:
        for name, error in (("full", Overloaded("full")), ("odd", ValueError()), ("left", None)):
            span = begin_span(name)
            fail_span(span, error)
            span.end()
        kinds = {span.name: (span.attributes or {})["error.type"] for span in spans.all()}
        assert all(span.status.status_code is StatusCode.ERROR for span in spans.all())
    assert kinds == {"full": Overloaded("full").code, "odd": "ValueError", "left": "aborted"}


def test_one_tracer_a_process() -> None:
    config = Config(otlp_endpoint="http://127.0.0.1:9")
    with kept_spans(), pytest.raises(RuntimeError, match="already"):
        start_tracing(config, Service.ROUTER, "0", "c")


@pytest.mark.parametrize(("ratio", "traced"), [(0.0, [3, 0, 1]), (1.0, [5, 5, 5])])
def test_clients_get_a_bounded_number_of_traces(ratio: float, traced: list[int]) -> None:
    now = 100.0
    bound = ClientTraces(3.0, ratio, clock=lambda: now, draw=lambda: 0.5)
    counts = []
    for pause in (0.1, 0.3, 60.0):
        kept = [bound.bounded(CLIENT) for _ in range(5)]
        counts.append(sum(one == CLIENT for one in kept))
        beyond = [one for one in kept if one != CLIENT]
        assert all(one.traceparent == f"00-{TRACE}-{SPAN}-00" for one in beyond)
        assert all(one.tracestate == CLIENT.tracestate for one in beyond)
        now += pause
    assert counts == traced


def test_without_an_allowance_the_ratio_decides() -> None:
    drawn = iter((0.1, 0.9))
    bound = ClientTraces(0.0, 0.5, draw=lambda: next(drawn))
    assert [bound.bounded(CLIENT) == CLIENT for _ in range(2)] == [True, False]


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{TRACE}-{SPAN}-00"])
def test_a_client_that_asks_for_no_trace_uses_no_allowance(parent: str) -> None:
    bound = ClientTraces(1.0, 0.0, clock=lambda: 0.0, draw=lambda: 0.5)
    for _ in range(3):
        assert bound.bounded(TraceContext(parent)) == TraceContext(parent)
    assert bound.bounded(CLIENT) == CLIENT


@pytest.mark.parametrize(
    ("parent", "found"),
    [
        (CLIENT.traceparent, TRACE),
        (f"00-{TRACE}-{SPAN}-03", TRACE),
        (f"00-{TRACE}-{SPAN}-00", ""),
        (f"00-{TRACE.upper()}-{SPAN}-01", ""),
        (f"{CLIENT.traceparent}\n", ""),
        ("", ""),
    ],
)
def test_the_id_of_a_sampled_trace(parent: str, found: str) -> None:
    assert sampled_trace_id(parent) == found
