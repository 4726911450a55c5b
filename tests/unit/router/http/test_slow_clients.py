"""Clients that hardly read: their memory is bounded, they are cut off, and slow no other client."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from typing import Any

import grpc.aio
import pytest

from baton.config.advanced import AdvancedConfig
from baton.config.cluster import Config
from baton.request import FinishReason
from baton.rpc import grpc_channel
from baton.rpc.grpc_channel import make_server
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.core.request import GenerationRequest, OutputDelta
from router.http.protocol import BoundedHttpProtocol
from router.http.uvicorn_internals import HIGH_WATER_LIMIT
from tests.support.router.front_fakes import (
    MODEL,
    Front,
    add_grpc,
    endless,
    make_front,
    plain_client,
    serve,
)

DEADLINE_S = 20.0
SLOW_S = 0.4
PROMPT = {"model": "tiny", "prompt": "Hello"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"


class Connections:
    """Those whose buffers have ever been full, and the most that each held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: dict[BoundedHttpProtocol, int] = {}
        pause = BoundedHttpProtocol.pause_writing

        def pause_writing(protocol: BoundedHttpProtocol) -> None:
            held = protocol.transport.get_write_buffer_size()
            self.most[protocol] = max(held, self.most.get(protocol, 0))
            pause(protocol)

        monkeypatch.setattr(BoundedHttpProtocol, "pause_writing", pause_writing)


def ask(address: str, body: dict[str, Any]) -> socket.socket:
    """A client that has asked and read nothing, with a buffer of its own that does not grow."""
    host, port = address.split(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
    client.connect((host, int(port)))
    content = json.dumps(body).encode()
    client.sendall(HEAD % (len(content), content))
    client.setblocking(False)
    return client


async def until(condition: Any) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.01)


async def brief(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    """For ever for the prompt of a slow client, else a few tokens."""
    if request.sampling.max_tokens > 8:
        async for delta in endless(request):
            yield delta
    for _ in range(7):
        yield OutputDelta("y", (66,), None)
        await asyncio.sleep(0.02)
    yield OutputDelta("y", (66,), FinishReason.LENGTH)


async def read_slowly(client: socket.socket, is_over: asyncio.Event) -> int:
    """A byte now and then until ``is_over``, then what is left; how many were read."""
    loop, count = asyncio.get_running_loop(), 0
    with suppress(ConnectionResetError):
        while got := len(await loop.sock_recv(client, 65536 if is_over.is_set() else 1)):
            count += got
            await asyncio.sleep(0 if is_over.is_set() else 0.02)
    return count


@pytest.mark.parametrize("reads", [False, True])
async def test_a_client_that_hardly_reads_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    connections = Connections(monkeypatch)
    front = make_front(brief)
    async with serve(front.app(), SLOW_S) as address:
        client = ask(address, {**PROMPT, "stream": True})
        with closing(client):
            is_over = asyncio.Event()
            reading = asyncio.create_task(read_slowly(client, is_over)) if reads else None
            await until(lambda: connections.most)
            # Others are answered while the slow one's buffers are full.
            async with plain_client(base_url=f"http://{address}") as other:
                body = {**PROMPT, "stream": True, "max_tokens": 8}
                answer = await other.post("/v1/completions", json=body)
                assert answer.text.count('"text":"y"') == 8
            await until(lambda: ("short", "aborted", "") in front.requests())
            is_over.set()
            if reading is not None:
                async with asyncio.timeout(DEADLINE_S):
                    # What the system had for it, some megabytes, is dropped.
                    assert await reading < 500_000
    ((protocol, most),) = connections.most.items()
    assert most <= HIGH_WATER_LIMIT + 8192, "the buffer and one event"
    assert protocol.transport.get_write_buffer_size() == 0
    assert front.requests() == {("short", "aborted", ""): 1, ("short", "ok", ""): 1}


async def test_a_client_that_reads_slowly_gets_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its buffers stay full for longer than a client may read nothing."""
    connections = Connections(monkeypatch)

    async def much(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        for _ in range(200):
            yield OutputDelta("x" * 32768, (65,), None)
        yield OutputDelta("", (65,), FinishReason.LENGTH)

    front = make_front(much)
    loop = asyncio.get_running_loop()
    async with serve(front.app(), 0.1) as address:
        client = ask(address, {**PROMPT, "stream": True})
        with closing(client):
            await until(lambda: connections.most)
            found, end = b"", loop.time() + 0.5
            async with asyncio.timeout(DEADLINE_S):
                while not found.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                    found += await loop.sock_recv(client, 65536)
                    await asyncio.sleep(0.01 if loop.time() < end else 0)
    assert front.requests() == {("short", "ok", ""): 1}


@asynccontextmanager
async def grpc_front(front: Front) -> AsyncIterator[str]:
    server = make_server()
    config = Config(advanced=AdvancedConfig(slow_client_s=SLOW_S))
    add_grpc(server, front.dispatcher, front.tokenizer, MODEL, front.stats, config)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_grpc_client_that_does_not_read_is_cut_off() -> None:
    front = make_front(brief)
    async with grpc_front(front) as address, grpc.aio.insecure_channel(address) as channel:
        async with asyncio.timeout(DEADLINE_S):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            slow = stub.Generate(inference_pb2.GenerateRequest(prompt="Hello"))
            await slow.read()
            request = inference_pb2.GenerateRequest(prompt="Hello")
            request.sampling.max_tokens = 8
            assert len([message async for message in stub.Generate(request)]) == 8
            await until(lambda: ("short", "error", "deadline_exceeded") in front.requests())
            # It reads on, and receives the error.
            assert await read_all(slow) is grpc.StatusCode.DEADLINE_EXCEEDED
    assert front.requests() == {
        ("short", "error", "deadline_exceeded"): 1,
        ("short", "ok", ""): 1,
    }


async def read_all(call: grpc.aio.UnaryStreamCall[Any, Any]) -> grpc.StatusCode:
    with suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()


async def test_a_connection_whose_client_answers_no_ping_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its machine has gone, or it reads nothing any more."""
    monkeypatch.setattr(grpc_channel, "SERVER_PING_MS", 200)
    monkeypatch.setattr(grpc_channel, "PING_TIMEOUT_MS", 200)
    async with grpc_front(make_front()) as address, asyncio.timeout(DEADLINE_S):
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with closing(writer), suppress(ConnectionError):
            settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
            while await reader.read(65536):
                pass
