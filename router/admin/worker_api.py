"""Operators' endpoints for workers and pools: the cluster's state, drains, roles and pool sizes.

The endpoints exist over HTTP and over gRPC.
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
from baton.version import VERSION
from router.access.access import Access
from router.admin.operator_call import grpc_call, http_call
from router.admin.worker_control import PoolScaling, WorkerControl, WorkerStatus
from router.grpc.call import Context
from router.http.client import Int

MAX_DEADLINE_S = 3600.0


class DrainRequest(BaseModel):
    """Options of a drain."""

    model_config = ConfigDict(extra="forbid", strict=True)

    deadline_s: float | None = Field(None, ge=0, le=MAX_DEADLINE_S)
    """Seconds after which the remaining requests migrate; absent: ``drain_deadline_s``."""
    force: bool = False
    """Act even on the last ready worker of a role, which otherwise gives a 409, ``last_worker``."""


class RoleRequest(DrainRequest):
    """The new role of a worker."""

    role: Literal["prefill", "decode"]


class ScaleRequest(BaseModel):
    """The new size of a pool."""

    model_config = ConfigDict(extra="forbid", strict=True)

    count: Int = Field(ge=0, le=MAX_WORKERS)
    force: bool = False
    """Act even if no prefill worker is left for a class with ``local_prefill`` never, which
    otherwise gives a 409, ``last_worker``."""


class Drained(BaseModel):
    object: str = "worker.drained"
    slot: str
    empty: bool
    """Whether no request was left at the deadline."""


class RoleChanged(BaseModel):
    object: str = "worker.role"
    slot: str
    role: str
    took_s: float
    """Seconds in which the worker took no work."""


class PoolScaled(BaseModel):
    object: str = "pool.scaled"
    pool: str
    count: int
    """Requested number of workers."""
    previous: int
    """Previously requested number of workers."""


class PoolObject(BaseModel):
    name: str
    role: str
    count: int
    """Requested number of workers."""


class ClusterObject(BaseModel):
    object: str = "cluster"
    id: str
    version: str
    """Baton's version in this router."""
    model: str
    workers: tuple[WorkerStatus, ...]
    """Workers that this router knows."""
    pools: list[PoolObject]


class WorkerApi:
    """The operators' endpoints for drains, role changes and pool sizes over HTTP."""

    def __init__(
        self, control: WorkerControl, scaling: PoolScaling, access: Access, config: Config
    ) -> None:
        self._control = control
        self._scaling = scaling
        self._access = access
        self._deadline_s = config.drain_deadline_s

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""
        path = "/v1/workers/{slot}"
        tags: list[str | None] = ["operations"]
        app.add_api_route(f"{path}/drain", self.drain, methods=["POST"], tags=tags)  # type: ignore[arg-type]
        app.add_api_route(f"{path}/role", self.change_role, methods=["POST"], tags=tags)  # type: ignore[arg-type]
        app.add_api_route("/v1/pools/{pool}/scale", self.scale, methods=["POST"], tags=tags)  # type: ignore[arg-type]

    async def drain(self, slot: str, request: Request, body: DrainRequest | None = None) -> Drained:
        """Drain a worker: it gets no new work, and its requests end or migrate.

        Requires a key with scope admin.
        """
        body = body or DrainRequest()
        with http_call(self._access, request, "drain", slot, force=body.force):
            empty = await self._control.drain(slot, self._deadline(body), force=body.force)
        return Drained(slot=slot, empty=empty)

    async def change_role(self, slot: str, request: Request, body: RoleRequest) -> RoleChanged:
        """Restart a worker in the other role. Requires a key with scope admin."""
        with http_call(
            self._access, request, "change role", slot, role=body.role, force=body.force
        ):
            took_s = await self._control.change_role(
                slot, body.role, self._deadline(body), force=body.force
            )
        return RoleChanged(slot=slot, role=body.role, took_s=took_s)

    async def scale(self, pool: str, request: Request, body: ScaleRequest) -> PoolScaled:
        """Set the number of workers of a pool. Requires a key with scope admin."""
        with http_call(self._access, request, "scale", pool, count=body.count, force=body.force):
            previous = await self._scaling.scale(pool, body.count, force=body.force)
        return PoolScaled(pool=pool, count=body.count, previous=previous)

    def _deadline(self, body: DrainRequest) -> float:
        return self._deadline_s if body.deadline_s is None else body.deadline_s


class ClusterApi:
    """``GET /v1/cluster``: the cluster's state, for operators before they act."""

    def __init__(
        self,
        cluster_id: str,
        model: str,
        control: WorkerControl,
        scaling: PoolScaling,
        access: Access,
    ) -> None:
        """Create the endpoint; ``model`` is the served model's name."""
        self._cluster_id = cluster_id
        self._model = model
        self._control = control
        self._scaling = scaling
        self._access = access

    def mount(self, app: FastAPI) -> None:
        """Add the endpoint to the app."""
        app.add_api_route("/v1/cluster", self.show, tags=["operations"])

    async def show(self, request: Request) -> ClusterObject:
        """Show the cluster's id, model, workers and pools. Requires a key with scope admin."""
        self._access.check(request.headers, "admin")
        sizes = await self._scaling.sizes()
        return ClusterObject(
            id=self._cluster_id,
            version=VERSION,
            model=self._model,
            workers=self._control.workers(),
            pools=[
                PoolObject(name=pool.name, role=pool.role, count=sizes[pool.name])
                for pool in self._scaling.pools
            ],
        )


class WorkerOperatorServicer(control_pb2_grpc.WorkerOperatorServiceServicer):
    """The operators' endpoints for drains, role changes and pool sizes over gRPC."""

    def __init__(
        self, control: WorkerControl, scaling: PoolScaling, access: Access, config: Config
    ) -> None:
        self._control = control
        self._scaling = scaling
        self._access = access
        self._deadline_s = config.drain_deadline_s

    def add_to(self, server: grpc.aio.Server) -> str:
        """Add the operators' service to a server that is not started yet. Return the service's full
        name. See ``router.grpc.call.Service``."""
        control_pb2_grpc.add_WorkerOperatorServiceServicer_to_server(self, server)
        return control_pb2.DESCRIPTOR.services_by_name["WorkerOperatorService"].full_name

    @guarded
    async def DrainWorker(  # noqa: N802 - gRPC's name
        self, request: control_pb2.DrainWorkerRequest, context: Context
    ) -> control_pb2.DrainWorkerResponse:
        """Drain a worker; control.proto describes the messages."""
        deadline_s = self._deadline(request)
        with grpc_call(self._access, context, "drain", request.slot, force=request.force):
            empty = await self._control.drain(request.slot, deadline_s, force=request.force)
        return control_pb2.DrainWorkerResponse(empty=empty)

    @guarded
    async def ChangeWorkerRole(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ChangeWorkerRoleRequest, context: Context
    ) -> control_pb2.ChangeWorkerRoleResponse:
        """Restart a worker in the other role; control.proto describes the messages."""
        deadline_s, role = self._deadline(request), request.role
        with grpc_call(
            self._access, context, "change role", request.slot, role=role, force=request.force
        ):
            took_s = await self._control.change_role(
                request.slot, role, deadline_s, force=request.force
            )
        return control_pb2.ChangeWorkerRoleResponse(took_ms=int(took_s * 1e3))

    @guarded
    async def ScalePool(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ScalePoolRequest, context: Context
    ) -> control_pb2.ScalePoolResponse:
        """Set the number of workers of a pool; control.proto describes the messages."""
        count = request.count
        with grpc_call(
            self._access, context, "scale", request.pool, count=count, force=request.force
        ):
            previous = await self._scaling.scale(request.pool, count, force=request.force)
        return control_pb2.ScalePoolResponse(previous=previous)

    def _deadline(
        self, request: control_pb2.DrainWorkerRequest | control_pb2.ChangeWorkerRoleRequest
    ) -> float:
        if not request.HasField("deadline_ms"):
            return self._deadline_s
        return min(MAX_DEADLINE_S, request.deadline_ms / 1e3)
