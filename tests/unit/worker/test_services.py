"""The services of a worker's role, on a server that runs, and how often it says that it lives."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio

from baton.config.advanced import AdvancedConfig
from baton.config.cluster import Config
from baton.rpc.grpc_channel import listen
from baton.rpc.worker_plane import WorkerPlane
from baton.v1 import decode_pb2, decode_pb2_grpc
from worker.services import DEFAULT_KEEPALIVE, Keepalive, RoleServices

DEADLINE_S = 30.0
PLANE = WorkerPlane.of(None, "a secret of the tests")


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    async def Handoffs(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, requests: Any, context: Any
    ) -> None:
        async for request in requests:
            await context.write(decode_pb2.HandoffsResponse(call=request.call))


async def test_a_role_s_methods_are_there_while_it_is_mounted() -> None:
    services = RoleServices()
    server = PLANE.server(services)
    services.register(server)
    address = f"127.0.0.1:{listen(server, '127.0.0.1:0')}"
    await server.start()
    try:
        async with PLANE.channel(address) as channel:
            stub: Any = decode_pb2_grpc.DecodeServiceStub(channel)
            assert await stub.Handoffs(timeout=DEADLINE_S).code() is grpc.StatusCode.UNIMPLEMENTED
            decode_pb2_grpc.add_DecodeServiceServicer_to_server(Decode(), services)  # type: ignore[abstract, arg-type]
            open_call = stub.Handoffs(timeout=DEADLINE_S)
            await open_call.write(decode_pb2.HandoffsRequest(call=1))
            assert (await open_call.read()).call == 1
            services.clear()
            assert await stub.Handoffs(timeout=DEADLINE_S).code() is grpc.StatusCode.UNIMPLEMENTED
            # What is open goes on.
            await open_call.write(decode_pb2.HandoffsRequest(call=2))
            assert (await open_call.read()).call == 2
            await open_call.done_writing()
            assert await open_call.code() is grpc.StatusCode.OK
    finally:
        await server.stop(None)


def test_several_come_before_silence_is_a_hang() -> None:
    keepalive = Keepalive.of(Config(advanced=AdvancedConfig(hang_s=0.4, heartbeat_s=1.0)))
    assert keepalive.next_s(busy=True) == 0.1
    assert keepalive.next_s(busy=False) == 1.0


def test_never_more_seldom_than_heartkeepalive() -> None:
    advanced = AdvancedConfig(hang_s=60.0, heartbeat_s=0.5)
    assert Keepalive.of(Config(advanced=advanced)).next_s(busy=True) == 0.5


def test_the_default_is_the_configurations() -> None:
    assert Keepalive.of(Config()) == DEFAULT_KEEPALIVE
