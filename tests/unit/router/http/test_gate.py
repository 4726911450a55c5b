"""The gate of an HTTP listener: errors of handlers, direct ones and those behind FastAPI."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

from baton.config.access import KeyConfig
from baton.config.cluster import Config
from baton.errors import NotFound
from baton.telemetry.metrics import RouterMetrics
from router.access.access import Access
from router.http.errors import add_error_handlers
from router.http.gate import HttpGate
from tests.support.router.front_fakes import plain_client, serve


async def fails(request: Request) -> Response:
    raise RuntimeError("odd")


async def refuses(request: Request) -> Response:
    raise NotFound("nothing here")


async def fails_midway(request: Request) -> Response:
    async def body() -> AsyncIterator[bytes]:
        yield b"a beginning"
        raise RuntimeError("odd")

    return StreamingResponse(body())


async def serves(request: Request) -> Response:
    return PlainTextResponse("served")


HANDLERS = {"fails": fails, "refuses": refuses, "breaks": fails_midway, "serves": serves}


def gate(**fields: Any) -> HttpGate:
    """All handlers twice: under /v1/completions/ directly, under /v1/models/ behind FastAPI."""
    app = FastAPI()
    add_error_handlers(app)
    for name, handler in HANDLERS.items():
        app.add_api_route(f"/v1/models/{name}", handler, methods=["POST"], response_model=None)
    config = Config(**fields)
    metrics = RouterMetrics(CollectorRegistry())
    direct = {f"/v1/completions/{name}": handler for name, handler in HANDLERS.items()}
    direct["/v1/messages"] = fails
    return HttpGate(app, Access(config, metrics), config, metrics, direct=direct)


BOTH = pytest.mark.parametrize("prefix", ["/v1/completions", "/v1/models"])


@BOTH
async def test_an_unexpected_error_is_answered_and_the_connection_stays(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        async with serve(gate()) as address, plain_client(base_url=f"http://{address}") as client:
            answer = await client.post(f"{prefix}/fails", headers={"x-request-id": "mine"})
            again = await client.post(f"{prefix}/serves")
            streams = [one.extensions["network_stream"] for one in (answer, again)]
            ports = {stream.get_extra_info("client_addr") for stream in streams}
    assert answer.status_code == 500
    assert answer.headers["x-request-id"] == "mine"
    assert answer.json()["error"]["message"] == "internal error: RuntimeError"
    assert again.text == "served"
    assert len(ports) == 1, "the connection was closed"
    assert [record.getMessage() for record in caplog.records] == [
        "unexpected error in request mine"
    ]


@BOTH
async def test_an_error_within_a_response_cuts_the_connection(
    prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(gate()) as address, plain_client(base_url=f"http://{address}") as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(f"{prefix}/breaks", headers={"x-request-id": "mine"})
    assert "unexpected error in request mine" in caplog.text


@BOTH
async def test_a_refusal_has_its_status(prefix: str) -> None:
    transport = httpx.ASGITransport(gate())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.post(f"{prefix}/refuses")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "nothing here")


async def test_errors_have_the_shape_of_their_path() -> None:
    transport = httpx.ASGITransport(gate())
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        refused = await client.post("/v1/messages", headers={"content-encoding": "gzip"})
        failed = await client.post("/v1/messages")
    assert refused.json()["error"]["type"] == "invalid_request_error"
    assert failed.json() == {
        "type": "error",
        "error": {"type": "api_error", "message": "internal error: RuntimeError"},
    }


ASKS, READS = ("authorization", "Bearer asks"), ("authorization", "Bearer reads")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([ASKS], 200),
        ([ASKS, ("x-api-key", "asks")], 200),
        ([("authorization", "Basic bmFtZTphc2tz"), ("x-api-key", "asks")], 200),
        ([ASKS, ("x-api-key", "reads")], 400),
        ([READS, ("x-api-key", "asks")], 400),
        ([READS, ASKS], 400),
        ([ASKS, READS], 400),
        ([ASKS, ASKS], 400),
        ([("x-api-key", "asks"), ("x-api-key", "reads")], 400),
        ([("authorization", ""), ("x-api-key", "asks")], 200),
    ],
)
async def test_a_request_has_one_credential(headers: list[tuple[str, str]], status: int) -> None:
    keys = tuple(
        KeyConfig(
            name=name,
            tenant="default",
            sha256=hashlib.sha256(name.encode()).hexdigest(),
            scopes=(scope,),
        )
        for name, scope in (("asks", "inference"), ("reads", "metrics"))
    )
    transport = httpx.ASGITransport(gate(keys=keys, require_key=True))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        answer = await client.post("/v1/models/serves", headers=headers)
    assert answer.status_code == status
    if status == 400:
        assert "more than one credential" in answer.json()["error"]["message"]
