"""OpenAI's fields of the prefix cache, at each of its endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.request import FinishReason, Retention
from router.core.request import GenerationRequest, OutputDelta
from tests.support.router.front_fakes import make_front
from tests.support.router.http_app import post

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "the fox"}]},
    "/v1/completions": {"prompt": ["the fox", "the dog"]},
    "/v1/responses": {"input": "the fox"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_key_and_retention_reach_the_dispatcher(path: str) -> None:
    front = make_front()
    wishes = {"prompt_cache_key": "agent-7", "prompt_cache_retention": "24h"}
    response = await post(front, path, {"model": "tiny", **BODIES[path], **wishes})
    assert response.status_code == 200, response.text
    for request in front.dispatcher.requests:
        assert request.cache_key == "agent-7"
        assert request.retentions == (Retention(len(request.prompt_ids), 86_400),)
    if path == "/v1/responses":
        assert response.json()["prompt_cache_key"] == "agent-7"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("retention", [None, "in_memory", "in-memory"])
async def test_by_default_nothing_is_kept(path: str, retention: str | None) -> None:
    front = make_front()
    wishes = {"prompt_cache_retention": retention}
    await post(front, path, {"model": "tiny", **BODIES[path], **wishes})
    assert front.dispatcher.requests
    for request in front.dispatcher.requests:
        assert (request.cache_key, request.retentions) == ("", ())


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [("prompt_cache_key", "x" * 257, "256"), ("prompt_cache_retention", "7d", "24h")],
)
async def test_what_is_out_of_bounds_is_refused_with_the_bound(
    path: str, field: str, value: str, bound: str
) -> None:
    front = make_front()
    response = await post(front, path, {"model": "tiny", **BODIES[path], field: value})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == field
    assert bound in error["message"]
    assert not front.dispatcher.requests


async def reading_and_writing(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    yield OutputDelta("x", (65,), None, cached_prompt_tokens=4, written_prompt_tokens=8)
    yield OutputDelta("y", (66,), FinishReason.STOP)


@pytest.mark.parametrize("path", BODIES)
async def test_usage_tells_what_was_read_and_written(path: str) -> None:
    front = make_front(reading_and_writing)
    response = await post(front, path, {"model": "tiny", **BODIES[path]})
    usage = response.json()["usage"]
    count = len(front.dispatcher.requests)
    found = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
    assert found == {"cached_tokens": 4 * count, "cache_write_tokens": 8 * count}
