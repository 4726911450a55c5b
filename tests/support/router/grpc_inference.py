"""Shared by the tests of inference and by other tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from baton.rpc.grpc_channel import open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from router.access.access import Access
from router.access.rate_limits import RateLimits
from router.grpc.gate import make_public_server
from tests.support.router.front_fakes import Front, add_grpc

Request = inference_pb2.GenerateRequest


@asynccontextmanager
async def serve(front: Front, limits: RateLimits | None = None) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the front's gRPC listener."""
    async with serve_at(front, limits) as address:
        channel = open_channel(address)
        try:
            yield channel
        finally:
            await channel.close()


@asynccontextmanager
async def serve_at(front: Front, limits: RateLimits | None = None) -> AsyncIterator[str]:
    """The host:port of the front's gRPC listener, as a router makes it."""
    access = Access(front.config, front.stats.metrics, limits)
    server = make_public_server(access, front.config)
    add_grpc(
        server, front.dispatcher, front.tokenizer, front.model, front.stats, front.config, access
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def generate(
    channel: grpc.aio.Channel, request: Request
) -> list[inference_pb2.GenerateResponse]:
    stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
    return [response async for response in stub.Generate(request, timeout=20)]


async def refused(front: Front, request: Request) -> grpc.aio.AioRpcError:
    async with serve(front) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(channel, request)
    return caught.value
