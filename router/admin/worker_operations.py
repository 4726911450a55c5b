"""Operators' endpoints for workers: draining them, changing their roles, choosing how many there

are. HTTP and gRPC.
"""

from __future__ import annotations

from typing import Literal

import grpc.aio
from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from baton.config.cluster import Config
from baton.rpc.grpc_errors import guarded
from baton.store.supervision import MAX_WORKERS
from baton.v1 import control_pb2, control_pb2_grpc
from router.admin.operator_api import Operators
from router.admin.pool_scaling import PoolScaling
from router.admin.worker_control import WorkerControl
from router.core.fields import Int
from router.grpc.call import metadata_of

Context = grpc.aio.ServicerContext[object, object]

MAX_DEADLINE_S = 3600.0


class DrainRequest(BaseModel):
    """What may be said of a drain."""

    model_config = ConfigDict(extra="forbid", strict=True)

    deadline_s: float | None = Field(None, ge=0, le=MAX_DEADLINE_S)
    """What is left after so many seconds is placed elsewhere; absent: ``drain_deadline_s``."""
    force: bool = False
    """Act on the last ready worker of a role, too. Otherwise that is a 409, ``last_worker``."""


class RoleRequest(DrainRequest):
    """What a worker is to be."""

    role: Literal["prefill", "decode"]


class ScaleRequest(BaseModel):
    """How many workers a pool is to have."""

    model_config = ConfigDict(extra="forbid", strict=True)

    count: Int = Field(ge=0, le=MAX_WORKERS)
    force: bool = False
    """Leave no prefill worker for a class with ``local_prefill`` never, too. Otherwise that is a
    409, ``last_worker``."""


class Drained(BaseModel):
    object: str = "worker.drained"
    slot: str
    empty: bool
    """Whether nothing was left before the deadline."""


class RoleChanged(BaseModel):
    object: str = "worker.role"
    slot: str
    role: str
    took_s: float
    """From taking no more work to serving again."""


class PoolScaled(BaseModel):
    object: str = "pool.scaled"
    pool: str
    count: int
    """How many workers it is to have."""
    previous: int
    """How many it was to have until now."""


class WorkerOperations:
    """HTTP."""

    def __init__(
        self, control: WorkerControl, scaling: PoolScaling, operators: Operators, config: Config
    ) -> None:
        self._control = control
        self._scaling = scaling
        self._operators = operators
        self._deadline_s = config.drain_deadline_s

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""
        path = "/v1/workers/{slot}"
        tags: list[str | None] = ["operations"]
        app.add_api_route(f"{path}/drain", self.drain, methods=["POST"], tags=tags)  # type: ignore[arg-type]
        app.add_api_route(f"{path}/role", self.change_role, methods=["POST"], tags=tags)  # type: ignore[arg-type]
        app.add_api_route("/v1/pools/{pool}/scale", self.scale, methods=["POST"], tags=tags)  # type: ignore[arg-type]

    async def drain(self, slot: str, request: Request, body: DrainRequest | None = None) -> Drained:
        """Drain a worker: it gets no new work, and what runs there ends or moves to another one.

        Needs an admin's key.
        """
        self._operators.check(request.headers)
        body = body or DrainRequest()
        empty = await self._control.drain(slot, self._deadline(body), force=body.force)
        return Drained(slot=slot, empty=empty)

    async def change_role(self, slot: str, request: Request, body: RoleRequest) -> RoleChanged:
        """Have a worker come back in the other role. Needs an admin's key."""
        self._operators.check(request.headers)
        took_s = await self._control.change_role(
            slot, body.role, self._deadline(body), force=body.force
        )
        return RoleChanged(slot=slot, role=body.role, took_s=took_s)

    async def scale(self, pool: str, request: Request, body: ScaleRequest) -> PoolScaled:
        """Choose how many workers a pool is to have. Needs an admin's key."""
        self._operators.check(request.headers)
        previous = await self._scaling.scale(pool, body.count, force=body.force)
        return PoolScaled(pool=pool, count=body.count, previous=previous)

    def _deadline(self, body: DrainRequest) -> float:
        return self._deadline_s if body.deadline_s is None else body.deadline_s


class WorkerOperatorServicer(control_pb2_grpc.WorkerOperatorServiceServicer):
    """gRPC."""

    def __init__(
        self, control: WorkerControl, scaling: PoolScaling, operators: Operators, config: Config
    ) -> None:
        self._control = control
        self._scaling = scaling
        self._operators = operators
        self._deadline_s = config.drain_deadline_s

    def add_to(self, server: grpc.aio.Server) -> str:
        """See ``router.grpc.call.Service``."""
        control_pb2_grpc.add_WorkerOperatorServiceServicer_to_server(self, server)
        return control_pb2.DESCRIPTOR.services_by_name["WorkerOperatorService"].full_name

    @guarded
    async def DrainWorker(  # noqa: N802 - gRPC's name
        self, request: control_pb2.DrainWorkerRequest, context: Context
    ) -> control_pb2.DrainWorkerResponse:
        """See control.proto."""
        self._operators.check(metadata_of(context))
        deadline_s = self._deadline(request)
        empty = await self._control.drain(request.slot, deadline_s, force=request.force)
        return control_pb2.DrainWorkerResponse(empty=empty)

    @guarded
    async def ChangeWorkerRole(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ChangeWorkerRoleRequest, context: Context
    ) -> control_pb2.ChangeWorkerRoleResponse:
        """See control.proto."""
        self._operators.check(metadata_of(context))
        deadline_s = self._deadline(request)
        took_s = await self._control.change_role(
            request.slot, request.role, deadline_s, force=request.force
        )
        return control_pb2.ChangeWorkerRoleResponse(took_ms=int(took_s * 1e3))

    @guarded
    async def ScalePool(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ScalePoolRequest, context: Context
    ) -> control_pb2.ScalePoolResponse:
        """See control.proto."""
        self._operators.check(metadata_of(context))
        previous = await self._scaling.scale(request.pool, request.count, force=request.force)
        return control_pb2.ScalePoolResponse(previous=previous)

    def _deadline(
        self, request: control_pb2.DrainWorkerRequest | control_pb2.ChangeWorkerRoleRequest
    ) -> float:
        if not request.HasField("deadline_ms"):
            return self._deadline_s
        return min(MAX_DEADLINE_S, request.deadline_ms / 1e3)
