"""The gRPC face of a worker's own life."""

from __future__ import annotations

from typing import Protocol

import grpc.aio

from baton.rpc.grpc_errors import guarded
from baton.v1 import control_pb2, control_pb2_grpc

Context = grpc.aio.ServicerContext[object, object]


class Drainable(Protocol):
    """A worker process."""

    async def drain(self, deadline_s: float) -> bool:
        """See ``WorkerProcess.drain``."""

    async def change_role(self, role: str, deadline_s: float) -> float:
        """See ``WorkerProcess.change_role``."""


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Runs on the control loop."""

    def __init__(self, process: Drainable) -> None:
        self._process = process

    @guarded
    async def Drain(  # noqa: N802 - gRPC's name
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        """See control.proto."""
        empty = await self._process.drain(request.deadline_ms / 1e3)
        return control_pb2.DrainResponse(empty=empty)

    @guarded
    async def ChangeRole(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ChangeRoleRequest, context: Context
    ) -> control_pb2.ChangeRoleResponse:
        """See control.proto."""
        took_s = await self._process.change_role(request.role, request.deadline_ms / 1e3)
        return control_pb2.ChangeRoleResponse(took_ms=int(took_s * 1e3))
