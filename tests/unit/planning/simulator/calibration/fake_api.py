"""An HTTP client whose router is a generator: no socket, and the real reading of its events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import httpx

Answer = Callable[[dict[str, Any]], AsyncGenerator[dict[str, Any], None]]
"""Events of the answer to a body."""


def client_of(answer: Answer) -> httpx.AsyncClient:
    """A client whose requests for completions ``answer`` takes."""

    async def events(body: dict[str, Any]) -> AsyncIterator[bytes]:
        async for event in answer(body):
            yield f"data: {json.dumps(event)}\n\n".encode()
        yield b"data: [DONE]\n\n"

    async def handle(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/completions"
        assert int(request.headers["x-baton-deadline-ms"]) > 0
        body = json.loads(request.content)
        assert body["stream"]
        assert body["ignore_eos"]
        assert body["return_token_ids"]
        return httpx.Response(200, content=events(body))

    return httpx.AsyncClient(transport=httpx.MockTransport(handle), base_url="http://baton")


def tokens(count: int = 1) -> dict[str, Any]:
    """An event with this many tokens."""
    return {"choices": [{"index": 0, "text": "x", "token_ids": [7] * count}]}
