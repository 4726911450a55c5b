"""Statistics and drops of caches, over HTTP and gRPC: access and results."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import grpc
import httpx
import pytest

from baton.config.access import KeyConfig
from baton.config.cluster import Config
from baton.errors import Forbidden, Unauthenticated
from baton.rpc.grpc_channel import make_server, open_channel
from baton.store.prefix_index import IndexSize
from baton.v1 import cache_pb2, cache_pb2_grpc
from router.access.access import Access
from router.admin.cache import (
    CacheApi,
    CacheControl,
    CacheStats,
    Dropped,
    OperatorServicer,
    WorkerCache,
)
from tests.support.router.admin_cache import key
from tests.support.router.front_fakes import (
    MODEL,
    add_grpc,
    check_schema,
    create_app,
    make_front,
    plain_client,
    serve,
)

DEADLINE_S = 20.0


class FakeControl:
    """Stands for ``router.admin.cache.CacheControl``."""

    def __init__(self) -> None:
        self.index: IndexSize | None = IndexSize(7, 400)
        self.dropped = 0

    async def stats(self) -> CacheStats:
        workers = (
            WorkerCache("decode-0", "decode", 16, 100, 60, 30, 10, 0, 5, 7, 50_000, 400, 100, 6),
            WorkerCache("prefill-0", "prefill", 16, 100, 100, 0, 0, 0, 0, 0, 50_000, 0, 0, 3),
        )
        return CacheStats(workers, self.index, 1000, 250)

    async def drop(self) -> list[Dropped]:
        self.dropped += 1
        return [Dropped("decode-0", 30), Dropped("prefill-0", 0, "gone")]


@dataclass
class Fronts:
    control: FakeControl
    http: httpx.AsyncClient
    grpc: cache_pb2_grpc.OperatorServiceAsyncStub


@asynccontextmanager
async def fronts(**config: Any) -> AsyncIterator[Fronts]:
    front = make_front(**config)
    access, control = Access(front.config, front.metrics), FakeControl()
    real = cast(CacheControl, control)
    parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    server = make_server()
    add_grpc(server, *parts, more=(OperatorServicer(real, access),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with (
            serve(create_app(*parts, more=(CacheApi(real, access),))) as address,
            plain_client(base_url=f"http://{address}", timeout=DEADLINE_S) as client,
            open_channel(f"127.0.0.1:{port}") as channel,
        ):
            stub: Any = cache_pb2_grpc.OperatorServiceStub(channel)
            yield Fronts(control, client, stub)
    finally:
        await server.stop(0)


async def test_cache_statistics_over_http_and_grpc() -> None:
    async with fronts() as there:
        body = (await there.http.get("/v1/cache/stats")).json()
        assert body["index"] == {"blocks": 7, "bytes": 400}
        assert (body["prompt_tokens"], body["cached_prompt_tokens"]) == (1000, 250)
        assert (body["total_entries"], body["total_size_mb"], body["hit_rate"]) == (42, 2.1, 0.25)
        worker, other = body["workers"]
        pinned = body["pinned_blocks"], worker["pinned_blocks"], other["pinned_blocks"]
        assert pinned == (9, 6, 3)
        assert (worker["total_entries"], worker["total_size_mb"]) == (30 + 5 + 7, 2.1)
        assert (worker["prompt_tokens"], worker["hit_rate"]) == (400, 0.25)
        assert (other["total_entries"], other["total_size_mb"], other["hit_rate"]) == (0, 0, 0)
        assert (worker["slot"], worker["total_blocks"], worker["cached_blocks"]) == (
            "decode-0",
            100,
            30,
        )
        assert (worker["host_blocks"], worker["disk_blocks"]) == (5, 7)
        told = await there.grpc.GetCacheStats(cache_pb2.GetCacheStatsRequest(), timeout=DEADLINE_S)
        assert (told.workers[0].host_blocks, told.workers[0].disk_blocks) == (5, 7)
        assert (told.workers[0].block_bytes, told.workers[0].prompt_tokens) == (50_000, 400)
        assert told.workers[0].cached_prompt_tokens == 100
        assert [one.pinned_blocks for one in told.workers] == [6, 3]
        assert (told.index_blocks, told.index_bytes, told.prompt_tokens) == (7, 400, 1000)
        assert told.workers[0].cached_blocks == 30
        there.control.index = None
        assert (await there.http.get("/v1/cache/stats")).json()["index"] is None
        told = await there.grpc.GetCacheStats(cache_pb2.GetCacheStatsRequest(), timeout=DEADLINE_S)
        assert not told.HasField("index_blocks")


async def test_caches_are_dropped_over_http_and_grpc() -> None:
    async with fronts() as there:
        answer = await there.http.delete("/v1/cache")
        assert answer.json()["workers"] == [
            {"slot": "decode-0", "blocks": 30, "error": None},
            {"slot": "prefill-0", "blocks": 0, "error": "gone"},
        ]
        told = await there.grpc.DropCaches(cache_pb2.DropCachesRequest(), timeout=DEADLINE_S)
        assert [(one.slot, one.blocks, one.error) for one in told.workers] == [
            ("decode-0", 30, ""),
            ("prefill-0", 0, "gone"),
        ]
        assert there.control.dropped == 2


@pytest.mark.parametrize(
    ("shown", "status", "code"),
    [
        ("root", 200, grpc.StatusCode.OK),
        ("ann", 403, grpc.StatusCode.PERMISSION_DENIED),
        ("unknown", 403, grpc.StatusCode.PERMISSION_DENIED),
        ("", 401, grpc.StatusCode.UNAUTHENTICATED),
    ],
)
async def test_where_there_are_keys_an_admins_is_needed(
    shown: str, status: int, code: grpc.StatusCode
) -> None:
    async with fronts(keys=(key("ann"), key("root", admin=True))) as there:
        headers = {"authorization": f"Bearer {shown}"} if shown else {}
        for method, path in (("GET", "/v1/cache/stats"), ("DELETE", "/v1/cache")):
            answer = await there.http.request(method, path, headers=headers)
            assert answer.status_code == status
            if status != 200:
                check_schema(answer.json(), "ErrorResponse")
        call = there.grpc.DropCaches(
            cache_pb2.DropCachesRequest(), timeout=DEADLINE_S, metadata=tuple(headers.items())
        )
        assert await call.code() is code
        assert there.control.dropped == (2 if status == 200 else 0)


@pytest.mark.parametrize(
    ("addresses", "refused"),
    [
        ({}, None),
        ({"http": "[::1]:8000", "grpc": "localhost:1"}, None),
        ({"http": "0.0.0.0:8000"}, Unauthenticated),
        ({"grpc": "10.0.0.1:8001"}, Unauthenticated),
    ],
)
def test_without_keys_loopback_is_needed(
    addresses: dict[str, str], refused: type[Exception] | None
) -> None:
    config = Config(**addresses)  # type: ignore[arg-type]
    access = Access(config, make_front().metrics)
    if refused is None:
        access.check({}, "admin")
        return
    with pytest.raises(refused):
        access.check({}, "admin")
    with pytest.raises(Forbidden):
        access.check({"authorization": "Bearer guess"}, "admin")


def test_callers_without_a_key_cannot_be_admins() -> None:
    with pytest.raises(ValueError, match="admin"):
        Config(keys=(KeyConfig(name="all", tenant="default", scopes=("admin",)),))
