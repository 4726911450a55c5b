"""Shared by the tests of worker api and by other tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import httpx
import redis

from baton.errors import LastWorker, NotFound
from baton.rpc.grpc_channel import make_server, open_channel
from baton.store.supervision import PoolSizes
from baton.v1 import control_pb2_grpc
from router.access.access import Access
from router.admin.worker_api import ClusterApi, WorkerApi, WorkerOperatorServicer
from router.admin.worker_control import PoolScaling, WorkerControl, WorkerStatus
from tests.support.router.front_fakes import (
    MODEL,
    add_grpc,
    create_app,
    make_front,
    plain_client,
    serve,
)

DEADLINE_S = 20.0


class FakeControl:
    """Stands for ``router.admin.worker_control.WorkerControl``."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    async def drain(self, slot: str, deadline_s: float, *, force: bool) -> bool:
        if slot == "prefill-0" and not force:
            raise LastWorker("prefill-0 is the last ready prefill worker", param="force")
        if slot not in ("decode-0", "prefill-0"):
            raise NotFound(f"there is no worker {slot!r}", param="worker")
        self.told.append((slot, deadline_s))
        return deadline_s > 0

    async def change_role(self, slot: str, role: str, deadline_s: float, *, force: bool) -> float:
        if slot == "prefill-0" and not force:
            raise LastWorker("prefill-0 is the last ready prefill worker", param="force")
        self.told.append((slot, role, deadline_s))
        return 0.25

    def running(self) -> dict[str, int]:
        return {"prefill": 1, "decode": 4}

    def workers(self) -> tuple[WorkerStatus, ...]:
        return (
            WorkerStatus("decode-0", "decode", "ready", 3, 1, is_last=True),
            WorkerStatus("prefill-0", "prefill", "draining", 0, 0, is_last=False),
        )


class FakeSizes:
    """Stands for ``baton.store.supervision.PoolSizes``."""

    def __init__(self) -> None:
        self.sizes: dict[str, int] = {}
        self.away = False

    async def read(self) -> dict[str, int]:
        if self.away:
            raise redis.ConnectionError
        return dict(self.sizes)

    async def write(self, pool: str, count: int) -> None:
        self.sizes[pool] = count


@dataclass
class Fronts:
    http: httpx.AsyncClient
    grpc: Any
    control: FakeControl = field(default_factory=FakeControl)
    sizes: FakeSizes = field(default_factory=FakeSizes)


@asynccontextmanager
async def fronts(**config: Any) -> AsyncIterator[Fronts]:
    front, control, sizes = make_front(**config), FakeControl(), FakeSizes()
    scaling = PoolScaling(front.config, cast(PoolSizes, sizes), control.running)
    access = Access(front.config, front.metrics)
    real = cast(WorkerControl, control)
    parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    server = make_server()
    servicer = WorkerOperatorServicer(real, scaling, access, front.config)
    add_grpc(server, *parts, more=(servicer,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    api = WorkerApi(real, scaling, access, front.config)
    view = ClusterApi("1f2e3d", MODEL.id, real, scaling, access)
    try:
        async with (
            serve(create_app(*parts, more=(api, view))) as address,
            plain_client(base_url=f"http://{address}", timeout=DEADLINE_S) as client,
            open_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub: Any = control_pb2_grpc.WorkerOperatorServiceStub(channel)
            yield Fronts(client, stub, control, sizes)
    finally:
        await server.stop(0)
