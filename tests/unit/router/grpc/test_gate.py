"""The public gRPC server: what it takes in of those that may ask nothing, and its bounds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.rpc.grpc_channel import open_channel
from loadtest.router.http2_client import Http2Connection, call_headers
from router.grpc import gate
from tests.support.router.access_access import bearer, key
from tests.support.router.front_fakes import make_front, silent
from tests.support.router.grpc_inference import Request, serve, serve_at

DEADLINE_S = 20.0
GENERATE = "/baton.v1.InferenceService/Generate"
METHODS = (GENERATE, "/baton.v1.TokenService/Tokenize", "/baton.v1.WorkerService/None")
KEYS: dict[str, Any] = {"keys": (key("asks", "inference"),), "require_key": True}
ASKS = tuple(bearer("asks").items())


def raw(channel: grpc.aio.Channel) -> Any:
    """To send bytes."""
    return channel


async def no_message() -> AsyncIterator[bytes]:
    await asyncio.Event().wait()
    yield b""


async def ended(call: Any) -> tuple[grpc.StatusCode, str]:
    return grpc.StatusCode(await call.code()), await call.details()


@pytest.mark.parametrize("method", METHODS)
async def test_a_stranger_is_refused_before_its_message(method: str) -> None:
    async with serve(make_front(**KEYS)) as channel:
        call = raw(channel).stream_stream(method)(no_message(), timeout=DEADLINE_S)
        assert (await ended(call))[0] is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("path", ["/baton.v1.TokenService/Tok\udcff", "\udc9c", "/"])
@pytest.mark.parametrize("metadata", [(), ASKS])
async def test_a_method_that_is_no_text_stops_nothing(path: str, metadata: Any) -> None:
    async with serve_at(make_front(**KEYS)) as address:
        host, port = address.rsplit(":", 1)
        loop = asyncio.get_running_loop()
        _, stranger = await loop.create_connection(Http2Connection, host, int(port))
        stranger.call(1, call_headers(path, metadata), b"")
        while 1 not in stranger.ended:
            stranger.changed.clear()
            await asyncio.wait_for(stranger.changed.wait(), DEADLINE_S)
        stranger.close()
        async with open_channel(address) as channel:
            call = raw(channel).unary_unary(METHODS[1])(b"", metadata=ASKS, timeout=DEADLINE_S)
            assert (await ended(call))[0] is not grpc.StatusCode.UNAVAILABLE
            unknown = raw(channel).unary_unary("/baton.v1.TokenService/None")
            call = unknown(b"", metadata=ASKS, timeout=DEADLINE_S)
            assert (await ended(call))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_call_has_one_credential() -> None:
    async with serve(make_front(**KEYS)) as channel:
        for second in (("authorization", "Bearer other"), ("x-api-key", "other")):
            call = raw(channel).unary_stream(GENERATE)(b"", metadata=(*ASKS, second))
            code, details = await ended(call)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "more than one credential" in details


@pytest.mark.parametrize("method", METHODS[:2])
async def test_a_message_has_a_deadline(method: str) -> None:
    async with serve(make_front(**KEYS, request_deadline_s=0.2)) as channel:
        call = raw(channel).stream_stream(method)(no_message(), timeout=DEADLINE_S, metadata=ASKS)
        code, details = await ended(call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert details == "the call's message did not arrive in time"


@pytest.mark.parametrize("method", METHODS[:2])
async def test_a_message_that_is_none_is_refused(
    method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(make_front()) as channel:
        call = raw(channel).unary_unary(method)(b"\xff\xff", timeout=DEADLINE_S)
        code, details = await ended(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details == "the message cannot be parsed"
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("size", "details"),
    [
        (4096, "the message is larger than 2048 bytes"),
        (2048 + (64 << 10) + 1, "Received message larger than max"),
    ],
)
async def test_a_message_is_no_larger_than_a_body(size: int, details: str) -> None:
    async with serve(make_front(max_body_bytes=2048)) as channel:
        content = Request(prompt="x" * size).SerializeToString()
        call = raw(channel).unary_stream(GENERATE)(content, timeout=DEADLINE_S)
        code, told = await ended(call)
    assert code is not grpc.StatusCode.OK
    assert details in told


async def test_calls_of_a_connection_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "MAX_STREAMS", 2)
    front = make_front(silent)
    async with serve(front) as channel, asyncio.timeout(DEADLINE_S):
        content = Request(prompt="Hello").SerializeToString()
        generate = raw(channel).unary_stream(GENERATE)
        calls = [generate(content) for _ in range(2)]
        while len(front.dispatcher.requests) < 2:
            await asyncio.sleep(0.01)
        calls.append(generate(content))
        # The third is sent when another has ended.
        await asyncio.sleep(0.1)
        assert len(front.dispatcher.requests) == 2
        calls[0].cancel()
        while len(front.dispatcher.requests) < 3:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()


async def is_closed(address: str) -> bool:
    """Whether the server closes a connection that speaks no HTTP/2, or sends nothing."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    with suppress(ConnectionResetError):
        async with asyncio.timeout(DEADLINE_S):
            while await reader.read(4096):
                pass
    writer.close()
    return True


async def test_a_connection_that_says_nothing_is_closed() -> None:
    async with serve_at(make_front(advanced={"head_deadline_s": 0.3})) as address:
        assert await is_closed(address)


async def test_connections_are_bounded() -> None:
    async with serve_at(make_front(advanced={"max_connections": 16})) as address:
        host, port = address.split(":")
        kept = [await asyncio.open_connection(host, int(port)) for _ in range(16)]
        # The server says its settings at once to each that it accepts.
        for reader, _ in kept:
            async with asyncio.timeout(DEADLINE_S):
                assert await reader.readexactly(9)
        assert await is_closed(address)
        assert not any(reader.at_eof() for reader, _ in kept)
        for _, writer in kept:
            writer.close()
