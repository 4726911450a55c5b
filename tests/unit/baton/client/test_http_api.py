"""Calls of the HTTP API: TLS, and which error each failure becomes."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from baton.client.http_api import api_errors, event_of, open_api, open_async_api
from baton.errors import (
    BatonError,
    ConfigError,
    DeadlineExceeded,
    ModelNotFound,
    NotFound,
    Overloaded,
    Unauthenticated,
    Unavailable,
    WorkerFailed,
)
from baton.security.tls import TlsFiles, server_context
from tests.support.certificates import Authority
from tests.support.loadtest.fake_server import Asked, FakeServer, fake_server, refusal

TIMEOUT_S = 0.1


def error(code: str | None, message: str = "it is so", **more: str) -> dict[str, Any]:
    return {"error": {"message": message, "code": code, "type": "t", "param": None, **more}}


def caught(work: Callable[[], object]) -> BatonError:
    with pytest.raises(BatonError) as found:
        work()
    return found.value


def get(url: str, api_key: str = "", tls: TlsFiles | None = None) -> str:
    with api_errors(), open_api(url, api_key, tls) as client:
        return client.get("/v1/models").text


async def hello(asked: Asked, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")


async def refused(status: int, body: object) -> BatonError:
    """The error of a call that is refused like this."""

    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(refusal(status, body))

    async with fake_server(answer) as server:
        both = await asyncio.to_thread(lambda: caught(lambda: get(server.url)))
        async with open_async_api(server.url) as client:
            with pytest.raises(type(both)) as found:
                await client.get("/v1/models")
    assert (found.value.message, found.value.param) == (both.message, both.param)
    return both


@pytest.mark.parametrize(
    ("status", "body", "kind", "message"),
    [
        (404, error("model_not_found"), ModelNotFound, "it is so (404 model_not_found)"),
        (401, error("invalid_api_key"), Unauthenticated, "it is so (401 invalid_api_key)"),
        (429, error("odd"), Overloaded, "it is so (429 odd)"),
        (404, error(None), NotFound, "it is so (404)"),
        (503, "<html>", Unavailable, "the router refused the request (503)"),
        (418, [], BatonError, "the router refused the request (418)"),
        (400, {"error": "no"}, BatonError, "the router refused the request (400)"),
    ],
)
async def test_an_error_is_that_of_its_code_or_status(
    status: int, body: object, kind: type[BatonError], message: str
) -> None:
    found = await refused(status, body)
    assert isinstance(found, kind)
    assert found.message == message


async def test_an_error_names_its_parameter() -> None:
    assert (await refused(400, error("invalid_value", param="top_p"))).param == "top_p"


async def test_a_refused_stream_is_read() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(refusal(429, error("overloaded")))

    def stream(server: FakeServer) -> None:
        with (
            api_errors(),
            open_api(server.url) as client,
            client.stream("POST", "/v1/completions", json={}),
        ):
            raise AssertionError("it was refused")

    async with fake_server(answer) as server:
        found = await asyncio.to_thread(lambda: caught(lambda: stream(server)))
    assert isinstance(found, Overloaded)


def test_nothing_listens() -> None:
    with socket.socket() as taken:
        # Bound and not listening: nothing else can take the port.
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        found = caught(lambda: get(url))
    assert isinstance(found, Unavailable)
    assert f"no router answers at {url} (" in found.message


async def test_an_answer_that_does_not_come_in_time() -> None:
    async def answer(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(10 * TIMEOUT_S)

    def wait(server: FakeServer) -> None:
        with api_errors(), open_api(server.url) as client:
            client.get("/v1/models", timeout=TIMEOUT_S)

    async with fake_server(answer) as server:
        found = await asyncio.to_thread(lambda: caught(lambda: wait(server)))
    assert isinstance(found, DeadlineExceeded)
    assert found.message == f"{server.url} did not answer in time"


@pytest.mark.parametrize("url", ["http://host:port", "http://[::1"])
def test_a_url_that_is_none(url: str) -> None:
    found = caught(lambda: get(url))
    assert isinstance(found, ConfigError)
    assert "not a URL such as http://" in found.message


def test_a_key_that_cannot_be_sent_is_not_shown() -> None:
    found = caught(lambda: get("http://127.0.0.1:1", "secret\n"))
    assert isinstance(found, ConfigError)
    assert "the API key cannot be sent" in found.message
    assert "secret" not in found.message


async def test_the_key_and_the_certificate_are_sent(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = TlsFiles.in_folder(authority.folder, "client")
    context = server_context(TlsFiles.in_folder(authority.folder, "router"))
    async with fake_server(hello, context) as server:
        assert await asyncio.to_thread(get, server.url, "key", own) == "hello"
        assert server.asked[0].headers["authorization"] == "Bearer key"
        async with open_async_api(server.url, tls=own) as client:
            assert (await client.get("/v1/models")).text == "hello"
        for files in (None, TlsFiles(authority=authority.certificate)):
            with pytest.raises(Unavailable, match="no router answers"):
                await asyncio.to_thread(get, server.url, "key", files)
        assert len(server.asked) == 2


def test_files_of_tls_that_cannot_be_used(tmp_path: Path) -> None:
    missing = TlsFiles(authority=tmp_path / "none.pem")
    assert isinstance(caught(lambda: get("https://127.0.0.1:1", tls=missing)), ConfigError)


def test_events() -> None:
    event = {"choices": [{"text": "a"}]}
    assert event_of(f"data: {json.dumps(event)}") == event
    assert event_of("data: [DONE]") is None
    assert event_of("") is None
    assert event_of(": keepalive") is None


@pytest.mark.parametrize(
    ("code", "kind"),
    [("deadline_exceeded", DeadlineExceeded), ("odd", WorkerFailed), (None, WorkerFailed)],
)
def test_an_event_that_reports_an_error(code: str | None, kind: type[BatonError]) -> None:
    shown = "it is so" if code is None else f"it is so ({code})"
    found = caught(lambda: event_of(f"data: {json.dumps(error(code))}"))
    assert (type(found), found.message) == (kind, shown)
