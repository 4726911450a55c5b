"""Headers of Baton's API, and that a router reads them."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx
import openai
import pytest

from baton.client import TraceContext, request_headers, retry_after_s
from baton.errors import Overloaded
from router.core.request import OutputDelta
from tests.support.router.front_fakes import MODEL, make_front, serve

TRACE = TraceContext("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "a=b")


def test_only_what_is_given_becomes_a_header() -> None:
    assert request_headers() == {}
    assert request_headers(
        api_key="k", deadline_s=0.0001, session="ann 1", request_id="r-1", trace=TRACE
    ) == {
        "authorization": "Bearer k",
        "x-baton-deadline-ms": "1",
        "x-baton-session": "ann 1",
        "x-request-id": "r-1",
        "traceparent": TRACE.traceparent,
        "tracestate": "a=b",
    }


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_deadline_is_above_zero(deadline_s: float) -> None:
    with pytest.raises(ValueError, match="deadline_s must be a number of seconds above 0"):
        request_headers(deadline_s=deadline_s)


@pytest.mark.parametrize("request_id", ["a b", "é", "x" * 129, "a\n"])
def test_a_request_id_is_one_that_the_router_keeps(request_id: str) -> None:
    with pytest.raises(ValueError, match="1 to 128 characters"):
        request_headers(request_id=request_id)


def test_an_api_key_that_is_no_header_is_not_shown() -> None:
    with pytest.raises(ValueError, match="authorization may have only printable") as caught:
        request_headers(api_key="secret\n")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "2", "retry-after-ms": "1500"}, 1.5),
        ({"retry-after": "2"}, 2.0),
        ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None),
        ({}, None),
    ],
)
def test_when_to_try_again(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(httpx.Headers(headers)) == seconds


async def test_a_router_reads_and_writes_them() -> None:
    front = make_front()
    async with (
        serve(front.app()) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none") as client,
    ):
        given = request_headers(deadline_s=12.5, session="ann", request_id="mine", trace=TRACE)
        response = await client.completions.with_raw_response.create(
            model=MODEL.id, prompt="a", max_tokens=1, extra_headers=given
        )
    assert response.headers["x-request-id"] == "mine"
    (request,) = front.dispatcher.requests
    assert request.session == "ann"
    assert 0 < request.deadline_s <= 12.5
    assert request.trace == TRACE


async def test_a_refusal_says_when_to_try_again() -> None:
    async def full(request: object) -> AsyncIterator[OutputDelta]:
        raise Overloaded("full", retry_after=1.5)
        yield

    async with (
        serve(make_front(full).app()) as address,
        openai.AsyncOpenAI(
            base_url=f"http://{address}/v1", api_key="none", max_retries=0
        ) as client,
    ):
        with pytest.raises(openai.RateLimitError) as caught:
            await client.completions.create(model=MODEL.id, prompt="a")
    assert caught.value.code == "overloaded"
    assert retry_after_s(caught.value.response.headers) == 1.5
