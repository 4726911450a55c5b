"""`GET /v1/cluster`: what an operator acts on. Commands show it before they change anything."""

from __future__ import annotations

from fastapi import FastAPI, Request
from pydantic import BaseModel

from router.admin.operator_api import Operators
from router.admin.pool_scaling import PoolScaling
from router.admin.worker_control import WorkerControl


class WorkerObject(BaseModel):
    slot: str
    role: str
    state: str
    running: int
    """Sequences in its batch."""
    waiting: int
    """Sequences that wait for a place in it."""
    is_last: bool
    """Whether no other worker of its role is ready: draining it needs ``force``."""


class PoolObject(BaseModel):
    name: str
    role: str
    count: int
    """Workers that it should have."""


class ClusterObject(BaseModel):
    object: str = "cluster"
    id: str
    model: str
    workers: list[WorkerObject]
    """Those that this router knows."""
    pools: list[PoolObject]


class ClusterApi:
    """HTTP."""

    def __init__(
        self,
        cluster_id: str,
        model: str,
        control: WorkerControl,
        scaling: PoolScaling,
        operators: Operators,
    ) -> None:
        """``model`` is the name under which it is served."""
        self._cluster_id = cluster_id
        self._model = model
        self._control = control
        self._scaling = scaling
        self._operators = operators

    def mount(self, app: FastAPI) -> None:
        """Add the endpoint to the app."""
        app.add_api_route("/v1/cluster", self.show, tags=["operations"])

    async def show(self, request: Request) -> ClusterObject:
        """The cluster's id and model, its workers, and its pools. Needs an admin's key."""
        self._operators.check(request.headers)
        sizes = await self._scaling.sizes()
        return ClusterObject(
            id=self._cluster_id,
            model=self._model,
            workers=[
                WorkerObject.model_validate(one, from_attributes=True)
                for one in self._control.workers()
            ],
            pools=[
                PoolObject(name=pool.name, role=pool.role, count=sizes[pool.name])
                for pool in self._scaling.pools
            ],
        )
