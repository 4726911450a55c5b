"""A client's name for its conversation reaches the dispatcher."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc
from tests.support.router.front_fakes import MODEL, make_front
from tests.support.router.grpc_inference import serve


@pytest.mark.parametrize(("headers", "session"), [({"X-Baton-Session": "a b"}, "a b"), ({}, "")])
async def test_http(headers: dict[str, str], session: str) -> None:
    front = make_front()
    transport = httpx.ASGITransport(front.app())
    body = {"model": MODEL.id, "prompt": "Hello", "max_tokens": 1}
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        response = await client.post("/v1/completions", json=body, headers=headers)
    assert response.status_code == 200
    assert [request.session for request in front.dispatcher.requests] == [session]


@pytest.mark.parametrize(
    ("metadata", "session"), [((("x-baton-session", "a b"),), "a b"), ((), "")]
)
async def test_grpc(metadata: tuple[tuple[str, str], ...], session: str) -> None:
    front = make_front()
    async with serve(front) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        request = inference_pb2.GenerateRequest(prompt="Hello")
        async for _ in stub.Generate(request, timeout=20, metadata=metadata):
            pass
    assert [request.session for request in front.dispatcher.requests] == [session]
