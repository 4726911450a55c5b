"""Draining workers and changing their roles, over both fronts."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest

from baton.config.pools import ContextClass, PoolConfig
from baton.errors import LastWorker, WorkerFailed
from baton.rpc.grpc_channel import open_channel
from baton.v1 import control_pb2
from baton.version import VERSION
from router.admin.worker_control import WorkerControl
from router.workers.worker_link import WorkerLink
from tests.support.mini_cluster import free_port
from tests.support.router.admin_cache import key
from tests.support.router.admin_worker_api import DEADLINE_S, fronts
from tests.support.router.front_fakes import (
    MODEL,
    check_schema,
)


async def test_a_worker_is_drained_over_http_and_grpc() -> None:
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


async def test_the_last_worker_of_a_role_is_kept_unless_that_is_forced() -> None:
    """Over both protocols, so that no client empties a role by mistake."""
    async with fronts() as there:
        for path, body in (("drain", {}), ("role", {"role": "decode"})):
            url = f"/v1/workers/prefill-0/{path}"
            answer = await there.http.post(url, json=body)
            assert answer.status_code == 409, answer.text
            check_schema(answer.json(), "ErrorResponse")
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("last_worker", "force")
            assert (await there.http.post(url, json=body | {"force": "yes"})).status_code == 400
            assert (await there.http.post(url, json=body | {"force": True})).is_success
        drain = control_pb2.DrainWorkerRequest(slot="prefill-0")
        change = control_pb2.ChangeWorkerRoleRequest(slot="prefill-0", role="decode")
        for call, request in (
            (there.grpc.DrainWorker, drain),
            (there.grpc.ChangeWorkerRole, change),
        ):
            refused = call(request, timeout=DEADLINE_S)
            assert await refused.code() is grpc.StatusCode.FAILED_PRECONDITION
            request.force = True
            await call(request, timeout=DEADLINE_S)
        assert len(there.control.told) == 4


def fake_link(slot: str, role: str, state: str = "ready") -> WorkerLink:
    record = SimpleNamespace(
        slot=slot,
        role=role,
        state=state,
        incarnation=f"{slot}:1",
        baton_version="1.2.3",
        fingerprint="f",
    )
    load = SimpleNamespace(running=2, waiting=1)
    return cast(WorkerLink, SimpleNamespace(record=record, engine_load=load, channel=None))


@pytest.mark.parametrize(
    ("others", "is_last"),
    [
        ([], True),
        ([("prefill-0", "prefill", "ready")], True),
        ([("decode-1", "decode", "draining")], True),
        ([("decode-1", "decode", "ready")], False),
    ],
)
async def test_which_worker_is_the_last_of_its_role(
    others: list[tuple[str, str, str]], is_last: bool
) -> None:
    links = [fake_link("decode-0", "decode"), *(fake_link(*one) for one in others)]
    control = WorkerControl(lambda: links, lambda link: link.record.state == "ready")
    view = control.workers()[0]
    assert (view.slot, view.running, view.waiting) == ("decode-0", 2, 1)
    assert view.is_last is is_last
    assert view.version == "1.2.3"
    # Past the guard, the call fails on the channel that the fake link does not have.
    refusal = LastWorker if is_last else AttributeError
    with pytest.raises(refusal):
        await control.drain("decode-0", DEADLINE_S)
    with pytest.raises(refusal):
        await control.change_role("decode-0", "prefill", DEADLINE_S)
    for forced in (
        control.drain("decode-0", DEADLINE_S, force=True),
        # A role that it has already leaves nothing behind.
        control.change_role("decode-0", "decode", DEADLINE_S),
    ):
        with pytest.raises(AttributeError):
            await forced


class Calls:
    """A channel whose calls stay in flight until they are let go."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.may_end = asyncio.Event()

    def unary_unary(self, *_: object, **__: object) -> Callable[..., Awaitable[SimpleNamespace]]:
        async def call(*_: object, **__: object) -> SimpleNamespace:
            self.begun.set()
            await self.may_end.wait()
            return SimpleNamespace(empty=True, took_ms=1)

        return call


@pytest.mark.parametrize("action", ["drain", "role", "forced drain"])
async def test_two_actions_at_once_do_not_take_the_last_two_workers_of_a_role(action: str) -> None:
    """The registry lists a worker as ready until it has said that it leaves."""
    calls = Calls()
    links = [fake_link(slot, "prefill") for slot in ("prefill-0", "prefill-1")]
    for link in links:
        link.channel = cast(Any, calls)
    control = WorkerControl(lambda: links, lambda _: True)
    first = asyncio.create_task(
        control.change_role("prefill-0", "decode", DEADLINE_S)
        if action == "role"
        else control.drain("prefill-0", DEADLINE_S, force=action == "forced drain")
    )
    async with asyncio.timeout(DEADLINE_S):
        await calls.begun.wait()
        assert [view.is_last for view in control.workers()] == [False, True]
        with pytest.raises(LastWorker, match="prefill-1 is the last ready prefill worker"):
            await control.drain("prefill-1", DEADLINE_S)
        with pytest.raises(LastWorker, match="prefill-1 is the last ready prefill worker"):
            await control.change_role("prefill-1", "decode", DEADLINE_S)
        calls.may_end.set()
        await first
        # What counts from here on is what the registry lists.
        assert [view.is_last for view in control.workers()] == [False, False]
        assert await control.drain("prefill-1", DEADLINE_S)


async def test_a_running_drain_can_be_requested_again() -> None:
    links = [fake_link("decode-0", "decode", "draining")]
    control = WorkerControl(lambda: links, lambda link: False)
    with pytest.raises(AttributeError):
        await control.drain("decode-0", DEADLINE_S)


async def test_a_cluster_is_shown_to_operators() -> None:
    async with fronts(keys=(key("ann"), key("root", admin=True))) as there:
        ann, root = ({"authorization": f"Bearer {name}"} for name in ("ann", "root"))
        assert (await there.http.get("/v1/cluster", headers=ann)).status_code == 403
        there.sizes.sizes = {"decode": 4, "gone": 9}
        answer = await there.http.get("/v1/cluster", headers=root)
        assert answer.json() == {
            "object": "cluster",
            "id": "1f2e3d",
            "version": VERSION,
            "model": MODEL.id,
            "workers": [
                {
                    "slot": "decode-0",
                    "role": "decode",
                    "state": "ready",
                    "running": 3,
                    "waiting": 1,
                    "is_last": True,
                    "version": "",
                },
                {
                    "slot": "prefill-0",
                    "role": "prefill",
                    "state": "draining",
                    "running": 0,
                    "waiting": 0,
                    "is_last": False,
                    "version": "",
                },
            ],
            "pools": [
                {"name": "prefill", "role": "prefill", "count": 1},
                {"name": "decode", "role": "decode", "count": 4},
            ],
        }
        there.sizes.away = True
        assert (await there.http.get("/v1/cluster", headers=root)).status_code == 503


async def test_a_worker_that_ended_is_reported_as_such() -> None:
    """Not by the words of gRPC, which name addresses."""
    async with open_channel(f"127.0.0.1:{free_port()}") as channel:
        link = SimpleNamespace(
            record=SimpleNamespace(
                slot="decode-0", role="decode", state="ready", incarnation="decode-0:1"
            ),
            channel=channel,
        )
        control = WorkerControl(lambda: [cast(WorkerLink, link)], lambda _: True)
        with pytest.raises(WorkerFailed, match=r"^decode-0 does not answer: it has ended"):
            await control.drain("decode-0", DEADLINE_S, force=True)
        with pytest.raises(WorkerFailed, match=r"^decode-0 does not answer: it has ended"):
            await control.change_role("decode-0", "decode", DEADLINE_S)


async def test_a_role_is_changed_over_http_and_grpc() -> None:
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
        # Decode workers prefill if no prefill worker does.
        answer = await there.http.post("/v1/pools/prefill/scale", json={"count": 0})
        assert answer.is_success
        assert there.sizes.sizes == {"decode": 2, "prefill": 0}


async def test_a_pool_whose_workers_something_else_places_is_scaled_by_its_command() -> None:
    command = "kubectl scale statefulset/baton-{pool} --replicas={count}"
    async with fronts(scale_command=command) as there:
        answer = await there.http.post("/v1/pools/decode/scale", json={"count": 3})
        assert answer.status_code == 409
        error = answer.json()["error"]
        assert error["code"] == "placed_elsewhere"
        assert error["message"].endswith("run kubectl scale statefulset/baton-decode --replicas=3")
        assert there.sizes.sizes == {}
        pools = (await there.http.get("/v1/cluster")).json()["pools"]
        assert {pool["name"]: pool["count"] for pool in pools} == {"prefill": 1, "decode": 4}


NEVER = {"local_prefill": "never"}
TWO_POOLS = (
    PoolConfig(name="prefill", role="prefill"),
    PoolConfig(name="long", role="prefill"),
    PoolConfig(name="decode", role="decode"),
)
OWN_POOL = (
    ContextClass(name="short", max_tokens=100),
    ContextClass(name="rest", pools=("long",), local_prefill="never"),
)


@pytest.mark.parametrize(
    ("config", "pool", "sizes", "is_refused"),
    [
        (NEVER, "prefill", {}, True),
        ({}, "prefill", {}, False),
        ({"classes": (ContextClass(name="all", local_prefill="never"),)}, "prefill", {}, True),
        (
            NEVER | {"classes": (ContextClass(name="a", local_prefill="auto"),)},
            "prefill",
            {},
            False,
        ),
        (NEVER | {"pools": TWO_POOLS}, "prefill", {}, False),
        (NEVER | {"pools": TWO_POOLS}, "prefill", {"long": 0}, True),
        ({"pools": TWO_POOLS, "classes": OWN_POOL}, "prefill", {}, False),
        ({"pools": TWO_POOLS, "classes": OWN_POOL}, "long", {}, True),
    ],
)
async def test_the_last_prefill_worker_of_a_class_is_kept_unless_forced(
    config: dict[str, Any], pool: str, sizes: dict[str, int], is_refused: bool
) -> None:
    async with fronts(**config) as there:
        there.sizes.sizes = dict(sizes)
        url = f"/v1/pools/{pool}/scale"
        request = control_pb2.ScalePoolRequest(pool=pool, count=0)
        if is_refused:
            answer = await there.http.post(url, json={"count": 0})
            assert answer.status_code == 409, answer.text
            check_schema(answer.json(), "ErrorResponse")
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("last_worker", "force")
            refused = there.grpc.ScalePool(request, timeout=DEADLINE_S)
            assert await refused.code() is grpc.StatusCode.FAILED_PRECONDITION
            assert there.sizes.sizes == sizes
            request.force = True
            await there.grpc.ScalePool(request, timeout=DEADLINE_S)
            assert there.sizes.sizes[pool] == 0
            there.sizes.sizes = dict(sizes)
        answer = await there.http.post(url, json={"count": 0, "force": is_refused})
        assert answer.is_success, answer.text
        assert there.sizes.sizes[pool] == 0


async def test_without_prefill_workers_other_pools_are_scaled() -> None:
    async with fronts(**NEVER) as there:
        there.sizes.sizes = {"prefill": 0}
        answer = await there.http.post("/v1/pools/decode/scale", json={"count": 2})
        assert answer.is_success, answer.text


async def test_a_refused_scaling_changes_nothing() -> None:
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


async def test_bad_worker_requests_are_refused() -> None:
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


async def test_the_cache_endpoints_require_an_admin() -> None:
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
