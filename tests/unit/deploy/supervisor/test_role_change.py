"""A worker is asked to play the other role, and answers or does not."""

from __future__ import annotations

from dataclasses import replace

import grpc.aio
import pytest

from baton.errors import BatonError, InvalidRequest
from baton.rpc.grpc_channel import make_server
from baton.rpc.grpc_errors import guarded
from baton.v1 import control_pb2, control_pb2_grpc
from deploy.supervisor.role_change import change_role
from tests.unit.baton.autoscaling.test_demand import record

Context = grpc.aio.ServicerContext[object, object]


class Worker(control_pb2_grpc.ControlServiceServicer):
    async def Drain(  # noqa: N802 - gRPC's name
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        raise NotImplementedError

    def __init__(self) -> None:
        self.asked: list[tuple[str, int]] = []

    @guarded
    async def ChangeRole(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ChangeRoleRequest, context: Context
    ) -> control_pb2.ChangeRoleResponse:
        self.asked.append((request.role, request.deadline_ms))
        if len(self.asked) > 1:
            raise InvalidRequest("not again")
        return control_pb2.ChangeRoleResponse(took_ms=1500)


async def test_a_worker_is_asked_and_its_error_is_told() -> None:
    worker, server = Worker(), make_server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        known = replace(record(), address=f"127.0.0.1:{port}")
        assert await change_role(known, "prefill", 30.0) == 1.5
        assert worker.asked == [("prefill", 30_000)]
        with pytest.raises(InvalidRequest, match="not again"):
            await change_role(known, "decode", 1.0)
    finally:
        await server.stop(0)
    with pytest.raises(BatonError):
        await change_role(known, "prefill", 0.1)
