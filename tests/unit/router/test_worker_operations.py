"""Draining workers and changing their roles, over both fronts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import grpc
import httpx
import pytest
import redis

from baton.errors import NotFound, WorkerFailed
from baton.grpc_channel import make_server, open_channel
from baton.pool_sizes import PoolSizes
from baton.v1 import control_pb2, control_pb2_grpc
from router.access import Access
from router.grpc_front import add_grpc_front
from router.http_app import create_app
from router.operator_api import Operators
from router.pool_scaling import PoolScaling
from router.worker_control import WorkerControl
from router.worker_links import WorkerLink
from router.worker_operations import WorkerOperations, WorkerOperatorServicer
from tests.mini_cluster import free_port
from tests.unit.router.front_fakes import MODEL, check_schema, make_front, serve
from tests.unit.router.test_operator_api import key

DEADLINE_S = 20.0


class FakeControl:
    """Stands for ``router.worker_control.WorkerControl``."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    async def drain(self, slot: str, deadline_s: float) -> bool:
        if slot != "decode-0":
            raise NotFound(f"there is no worker {slot!r}", param="worker")
        self.told.append((slot, deadline_s))
        return deadline_s > 0

    async def change_role(self, slot: str, role: str, deadline_s: float) -> float:
        self.told.append((slot, role, deadline_s))
        return 0.25


class FakeSizes:
    """Stands for ``baton.pool_sizes.PoolSizes``."""

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
    scaling = PoolScaling(front.config.pools, cast(PoolSizes, sizes))
    access = Access(front.config, front.metrics)
    operators, real = Operators(access), cast(WorkerControl, control)
    parts = (front.dispatcher, front.tokenizer, MODEL, front.metrics, front.config, access)
    server = make_server()
    servicer = WorkerOperatorServicer(real, scaling, operators, front.config)
    add_grpc_front(server, *parts, more=(servicer,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    api = WorkerOperations(real, scaling, operators, front.config)
    try:
        async with (
            serve(create_app(*parts, more=(api,))) as address,
            httpx.AsyncClient(base_url=f"http://{address}", timeout=DEADLINE_S) as client,
            open_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub: Any = control_pb2_grpc.WorkerOperatorServiceStub(channel)
            yield Fronts(client, stub, control, sizes)
    finally:
        await server.stop(0)


async def test_drains() -> None:
    async with fronts(drain_deadline_s=7.0) as there:
        answer = await there.http.post("/v1/workers/decode-0/drain")
        assert answer.json() == {"object": "worker.drained", "slot": "decode-0", "empty": True}
        answer = await there.http.post("/v1/workers/decode-0/drain", json={"deadline_s": 0})
        assert not answer.json()["empty"]
        told = await there.grpc.DrainWorker(
            control_pb2.DrainWorkerRequest(slot="decode-0", deadline_ms=1500), timeout=DEADLINE_S
        )
        assert told.empty
        assert there.control.told == [("decode-0", 7.0), ("decode-0", 0.0), ("decode-0", 1.5)]


async def test_one_that_has_gone_is_told_as_such() -> None:
    """Not by the words of gRPC, which name addresses."""
    async with open_channel(f"127.0.0.1:{free_port()}") as channel:
        link = SimpleNamespace(
            record=SimpleNamespace(slot="decode-0", role="decode", incarnation="decode-0:1"),
            channel=channel,
        )
        control = WorkerControl(lambda: [cast(WorkerLink, link)], lambda _: True)
        with pytest.raises(WorkerFailed, match=r"^decode-0 does not answer: it has ended"):
            await control.drain("decode-0", DEADLINE_S)
        with pytest.raises(WorkerFailed, match=r"^decode-0 does not answer: it has ended"):
            await control.change_role("decode-0", "decode", DEADLINE_S)


async def test_roles() -> None:
    async with fronts(drain_deadline_s=7.0) as there:
        body = {"role": "decode"}
        answer = await there.http.post("/v1/workers/prefill-1/role", json=body)
        assert answer.json() == {
            "object": "worker.role",
            "slot": "prefill-1",
            "role": "decode",
            "took_s": 0.25,
        }
        request = control_pb2.ChangeWorkerRoleRequest(slot="prefill-1", role="prefill")
        told = await there.grpc.ChangeWorkerRole(request, timeout=DEADLINE_S)
        assert told.took_ms == 250
        assert there.control.told == [
            ("prefill-1", "decode", 7.0),
            ("prefill-1", "prefill", 7.0),
        ]


async def test_pools_are_scaled() -> None:
    async with fronts() as there:
        answer = await there.http.post("/v1/pools/decode/scale", json={"count": 3})
        assert answer.json() == {
            "object": "pool.scaled",
            "pool": "decode",
            "count": 3,
            "previous": 1,
        }
        request = control_pb2.ScalePoolRequest(pool="decode", count=2)
        assert (await there.grpc.ScalePool(request, timeout=DEADLINE_S)).previous == 3
        # Decode workers prefill where nobody else does.
        answer = await there.http.post("/v1/pools/prefill/scale", json={"count": 0})
        assert answer.is_success
        assert there.sizes.sizes == {"decode": 2, "prefill": 0}


async def test_what_cannot_be_scaled_is_left_as_it_is() -> None:
    async with fronts() as there:
        for pool, body, status in (
            ("decode", {"count": 0}, 400),
            ("decode", {"count": 2000}, 400),
            ("decode", {}, 400),
            ("decode", {"count": True}, 400),
            ("decode", {"count": "2"}, 400),
            ("encode", {"count": 1}, 404),
        ):
            answer = await there.http.post(f"/v1/pools/{pool}/scale", json=body)
            assert answer.status_code == status, answer.text
        request = control_pb2.ScalePoolRequest(pool="decode", count=5000)
        assert await there.grpc.ScalePool(request).code() is grpc.StatusCode.INVALID_ARGUMENT
        there.sizes.away = True
        answer = await there.http.post("/v1/pools/decode/scale", json={"count": 1})
        assert answer.status_code == 503
        assert there.sizes.sizes == {}


async def test_what_is_wrong_is_said() -> None:
    async with fronts() as there:
        for path, body, status in (
            ("decode-9/drain", {}, 404),
            ("decode-0/drain", {"deadline_s": -1}, 400),
            ("decode-0/drain", {"until": 1}, 400),
            ("decode-0/role", {"role": "both"}, 400),
            ("decode-0/role", {}, 400),
        ):
            answer = await there.http.post(f"/v1/workers/{path}", json=body)
            assert answer.status_code == status, answer.text
            check_schema(answer.json(), "ErrorResponse")
        call = there.grpc.DrainWorker(
            control_pb2.DrainWorkerRequest(slot="decode-9"), timeout=DEADLINE_S
        )
        assert await call.code() is grpc.StatusCode.NOT_FOUND
        assert there.control.told == []


async def test_an_admin_is_needed() -> None:
    async with fronts(keys=(key("ann"), key("root", admin=True))) as there:
        for name, status in (("ann", 403), ("root", 200)):
            headers = {"authorization": f"Bearer {name}"}
            answer = await there.http.post("/v1/workers/decode-0/drain", headers=headers)
            assert answer.status_code == status
            answer = await there.http.post(
                "/v1/pools/decode/scale", headers=headers, json={"count": 1}
            )
            assert answer.status_code == status
        request = control_pb2.ChangeWorkerRoleRequest(slot="decode-0", role="prefill")
        call = there.grpc.ChangeWorkerRole(request, timeout=DEADLINE_S)
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        call = there.grpc.ScalePool(control_pb2.ScalePoolRequest(pool="decode", count=1))
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        assert len(there.control.told) == 1
