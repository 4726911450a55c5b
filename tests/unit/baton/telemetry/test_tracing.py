"""Spans have the given parents, and cost nothing where tracing is off."""

from __future__ import annotations

import time

import pytest
from opentelemetry.trace import INVALID_SPAN, StatusCode

from baton.errors import Overloaded
from baton.request import NO_TRACE, TraceContext
from baton.telemetry.tracing import (
    begin_span,
    context_of,
    end_tracing,
    fail_span,
    start_tracing,
    trace_id_of,
)
from tests.support.span_keeper import identity, kept_spans

TRACE = "0af7651916cd43dd8448eb211c80319c"
SPAN = "b7ad6b7169203331"
CLIENT = TraceContext(f"00-{TRACE}-{SPAN}-01", "vendor=1")


def test_off_there_are_no_spans_and_a_clients_context_goes_through() -> None:
    start_tracing("", "tests", "0", 1.0)
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
    with kept_spans(), pytest.raises(RuntimeError, match="already"):
        start_tracing("http://127.0.0.1:9", "tests", "0", 1.0)
