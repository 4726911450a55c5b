"""Calls to workers without certificates: a caller shows the cluster's token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.rpc.grpc_channel import listen, open_channel
from baton.rpc.worker_plane import (
    OPEN_PLANE,
    SCHEMA_KEY,
    TOKEN_KEY,
    VERSION_KEY,
    WorkerPlane,
)
from baton.security.cluster_secret import new_secret
from baton.v1 import control_pb2, control_pb2_grpc, decode_pb2, decode_pb2_grpc
from baton.version import SCHEMA, VERSION
from loadtest.router.http2_client import Http2Connection, call_headers

DEADLINE_S = 30.0
PLANE = WorkerPlane.of(None, "a secret of the tests")


class Worker(control_pb2_grpc.ControlServiceServicer, decode_pb2_grpc.DecodeServiceServicer):
    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def Drain(  # noqa: N802 - gRPC's name
        self, request: control_pb2.DrainRequest, context: Any
    ) -> control_pb2.DrainResponse:
        self.calls.append(dict(context.invocation_metadata()))
        return control_pb2.DrainResponse(empty=True)

    async def Handoffs(  # type: ignore[override]  # noqa: N802
        self, requests: Any, context: Any
    ) -> None:
        async for request in requests:
            self.calls.append(request.call)
            await context.write(decode_pb2.HandoffsResponse(call=request.call))


@asynccontextmanager
async def worker(plane: WorkerPlane) -> AsyncIterator[tuple[Worker, str]]:
    server, servicer = plane.server(), Worker()  # type: ignore[abstract]
    control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server)
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(servicer, server)
    port = listen(server, "127.0.0.1:0")
    await server.start()
    try:
        yield servicer, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def drain(channel: grpc.aio.Channel, **options: Any) -> grpc.StatusCode:
    stub: Any = control_pb2_grpc.ControlServiceStub(channel)
    call = stub.Drain(control_pb2.DrainRequest(), timeout=DEADLINE_S, **options)
    return grpc.StatusCode(await call.code())


async def test_a_caller_of_the_cluster_sends_its_token_with_its_own_metadata() -> None:
    async with worker(PLANE) as (servicer, address), PLANE.channel(address) as channel:
        code = await drain(channel, metadata=(("traceparent", "00-1"),))
        assert code is grpc.StatusCode.OK
        assert servicer.calls[0]["traceparent"] == "00-1"
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        stream = stub.Handoffs(timeout=DEADLINE_S)
        for number in (1, 2):
            await stream.write(decode_pb2.HandoffsRequest(call=number))
            assert (await stream.read()).call == number
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK


async def test_a_method_that_is_no_text_stops_no_worker() -> None:
    async with worker(PLANE) as (_, address), PLANE.channel(address) as channel:
        host, port = address.rsplit(":", 1)
        loop = asyncio.get_running_loop()
        _, stranger = await loop.create_connection(Http2Connection, host, int(port))
        stranger.call(1, call_headers("/baton.v1.ControlService/Dr\udcff"), b"")
        while 1 not in stranger.ended:
            stranger.changed.clear()
            await asyncio.wait_for(stranger.changed.wait(), DEADLINE_S)
        stranger.close()
        assert await drain(channel) is grpc.StatusCode.OK


@pytest.mark.parametrize(
    "token", [None, "", "x", PLANE.token[:-1], PLANE.token + "0", WorkerPlane.of(None, "").token]
)
async def test_a_stranger_reaches_no_method(token: str | None) -> None:
    """Another user of the machine: the port is on loopback, and open to it."""
    shown = () if token is None else ((TOKEN_KEY, token),)
    async with worker(PLANE) as (servicer, address), open_channel(address) as channel:
        assert await drain(channel, metadata=shown) is grpc.StatusCode.UNAUTHENTICATED
        stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
        stream = stub.Handoffs(timeout=DEADLINE_S, metadata=shown)
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "cluster_secret" in (await stream.details() or "")
        assert servicer.calls == []


async def test_a_router_of_another_cluster_is_refused() -> None:
    other = WorkerPlane.of(None, new_secret())
    async with worker(PLANE) as (servicer, address), other.channel(address) as channel:
        assert await drain(channel) is grpc.StatusCode.UNAUTHENTICATED
        assert servicer.calls == []


async def test_no_message_of_a_stranger_is_read() -> None:
    """60 MiB of a caller without the token are no reason to hold 60 MiB."""
    async with worker(PLANE) as (_, address), open_channel(address) as channel:
        method: Any = channel.unary_unary("/baton.v1.ControlService/Drain")
        call = method(bytes(60 << 20), timeout=DEADLINE_S)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_benchmark_of_single_parts_needs_no_token() -> None:
    async with worker(OPEN_PLANE) as (_, address), OPEN_PLANE.channel(address) as channel:
        assert await drain(channel) is grpc.StatusCode.OK


async def test_a_call_names_its_version_and_schema() -> None:
    async with worker(PLANE) as (servicer, address), PLANE.channel(address) as channel:
        assert await drain(channel) is grpc.StatusCode.OK
        shown = servicer.calls[0]
        assert (shown[VERSION_KEY], shown[SCHEMA_KEY]) == (VERSION, str(SCHEMA))


@pytest.mark.parametrize("schema", [SCHEMA - 1, SCHEMA, SCHEMA + 1, None])
async def test_a_caller_of_the_release_before_or_after_is_served(schema: int | None) -> None:
    """A caller of Baton 0.1.0 shows no schema."""
    shown = [(TOKEN_KEY, PLANE.token)]
    if schema is not None:
        shown += [(SCHEMA_KEY, str(schema)), (VERSION_KEY, "9.9.9")]
    async with worker(PLANE) as (_, address), open_channel(address) as channel:
        assert await drain(channel, metadata=tuple(shown)) is grpc.StatusCode.OK


@pytest.mark.parametrize("schema", [str(SCHEMA + 2), "9" * 4000, "-1", "x", ""])
async def test_a_caller_of_another_schema_gets_an_error_with_the_reason(schema: str) -> None:
    shown = ((TOKEN_KEY, PLANE.token), (SCHEMA_KEY, schema), (VERSION_KEY, "9.9.9"))
    async with worker(PLANE) as (servicer, address), open_channel(address) as channel:
        stub: Any = control_pb2_grpc.ControlServiceStub(channel)
        call = stub.Drain(control_pb2.DrainRequest(), timeout=DEADLINE_S, metadata=shown)
        assert await call.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "schema" in await call.details()
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        stream = stub.Handoffs(timeout=DEADLINE_S, metadata=shown)
        assert await stream.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert servicer.calls == []


async def test_a_stranger_learns_no_version() -> None:
    shown = ((SCHEMA_KEY, str(SCHEMA + 2)),)
    async with worker(PLANE) as (_, address), open_channel(address) as channel:
        assert await drain(channel, metadata=shown) is grpc.StatusCode.UNAUTHENTICATED
