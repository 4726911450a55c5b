"""grpc.health.v1, which strangers may call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from baton.rpc.grpc_channel import open_channel
from router.grpc import health
from tests.support.router.front_fakes import make_front
from tests.support.router.grpc_inference import serve, serve_at

DEADLINE_S = 20.0
Response = health_pb2.HealthCheckResponse
ASKED = health_pb2.HealthCheckRequest()


def raw(channel: grpc.aio.Channel) -> Any:
    """To send bytes."""
    return channel


def watch(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(ASKED, timeout=DEADLINE_S)


async def test_health() -> None:
    front = make_front()
    async with serve(front) as channel, asyncio.timeout(DEADLINE_S):
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", "baton.v1.InferenceService"):
            request = health_pb2.HealthCheckRequest(service=service)
            assert (await stub.Check(request)).status == Response.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Check(health_pb2.HealthCheckRequest(service="other"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        unknown = aiter(stub.Watch(health_pb2.HealthCheckRequest(service="other")))
        assert (await anext(unknown)).status == Response.SERVICE_UNKNOWN


async def test_one_poller_tells_all_watchers() -> None:
    front = make_front()
    async with serve(front) as channel, asyncio.timeout(DEADLINE_S):
        calls = [watch(channel) for _ in range(5)]
        watches = [aiter(call) for call in calls]
        for status, expected in (
            ("ok", Response.SERVING),
            ("down", Response.NOT_SERVING),
            ("ok", Response.SERVING),
        ):
            front.dispatcher.status = (status, "")
            for one in watches:
                assert (await anext(one)).status == expected
        pollers = [task for task in asyncio.all_tasks() if task.get_name() == "health"]
        assert len(pollers) == 1
        for call in calls:
            call.cancel()
        while not pollers[0].done():
            await asyncio.sleep(0.01)


async def test_a_connection_has_a_bounded_number_of_calls() -> None:
    async with serve_at(make_front()) as address, asyncio.timeout(DEADLINE_S):
        channel, other = open_channel(address), open_channel(address)
        watches = [watch(channel) for _ in range(health.MAX_CALLS_OF_A_CONNECTION)]
        for one in watches:
            await one.read()
        assert await watch(channel).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        status = await health_pb2_grpc.HealthStub(other).Check(ASKED)
        assert status.status == Response.SERVING
        for one in watches:
            assert not one.done()
        await channel.close()
        await other.close()


async def test_a_new_call_takes_the_place_of_the_oldest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "MAX_CALLS", 2)
    async with serve_at(make_front()) as address, asyncio.timeout(DEADLINE_S):
        channels = [open_channel(address) for _ in range(3)]
        first = watch(channels[0])
        assert (await first.read()).status == Response.SERVING
        second = watch(channels[1])
        assert (await second.read()).status == Response.SERVING
        status = await health_pb2_grpc.HealthStub(channels[2]).Check(ASKED)
        assert status.status == Response.SERVING
        assert await first.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not second.done()
        for channel in channels:
            await channel.close()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_a_call_without_a_message_ends(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(health, "ASK_S", 0.2)

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with serve(make_front()) as channel:
        call = raw(channel).stream_stream(f"/{health.NAME}/{method}")(nothing(), timeout=DEADLINE_S)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await call.details() == "the call's message did not arrive in time"


async def test_a_message_that_is_none_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with serve(make_front()) as channel:
        call = raw(channel).unary_unary(f"/{health.NAME}/Check")(b"\xff\xff", timeout=DEADLINE_S)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caplog.text == ""
