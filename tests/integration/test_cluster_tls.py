"""Mutual TLS within a cluster: who may speak to a worker, on each of its planes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import torch
from torch.distributed.distributed_c10d import Work

from baton.config.tls import TlsConfig
from baton.errors import BatonError
from baton.rpc.grpc_channel import listen, make_server, open_channel
from baton.sampling_params import SamplingParams
from baton.security.peer_roles import callers_of
from baton.security.tls import PeerRole, TlsFiles
from baton.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)
from kvtransfer.transports.process_group import transport as transport_module
from kvtransfer.transports.process_group.process_pair import GlooPair
from router.admin import cluster_metrics
from router.admin.cluster_metrics import cluster_page
from router.console import worker_page
from router.console.worker_page import WorkerPages
from router.http.metrics_pages import MetricsPages
from tests.support.certificates import Authority
from tests.support.mini_cluster import MiniCluster, mini_cluster

DEADLINE_S = 60.0
PROMPT = tuple(range(40, 100))
SAMPLING = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("strangers"), "stranger")


@pytest.fixture
async def cluster(
    tiny_model: Path, redis_url: str, authority: Authority
) -> AsyncIterator[MiniCluster]:
    tls = TlsConfig(folder=str(authority.folder))
    async with mini_cluster(tiny_model, redis_url, tls=tls, transport="grpc") as running:
        yield running


async def test_requests_are_served_and_kv_crosses_by_mutual_tls(cluster: MiniCluster) -> None:
    answer = await cluster.answer(PROMPT, SAMPLING)
    assert len(answer.token_ids) == 4
    handoffs = {"outcome": "ok", "transport": "grpc"}
    assert cluster.value("decode-0", "baton_handoffs_total", **handoffs) == 1
    await cluster.until_idle()


@pytest.mark.parametrize("is_attacked", [False, True])
async def test_kv_outside_of_tls_is_authenticated(
    tiny_model: Path,
    redis_url: str,
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
    is_attacked: bool,
) -> None:
    """By gloo in a named network. Changed bytes end a handoff, and no plan sees them."""
    changed: list[int] = []

    class Attacked(GlooPair):
        def send(self, data: torch.Tensor, tag: int) -> Work:
            if is_attacked and not changed:
                changed.append(tag)
                data[len(data) // 2] ^= 1
            return super().send(data, tag)

    monkeypatch.setattr(transport_module, "GlooPair", Attacked)
    async with mini_cluster(
        tiny_model,
        redis_url,
        tls=TlsConfig(folder=str(authority.folder)),
        transport="gloo",
        data_network="127.0.0.0/8",
    ) as cluster:
        first = await cluster.answer(PROMPT, SAMPLING)
        outcomes = {
            outcome: cluster.value(
                "decode-0", "baton_handoffs_total", outcome=outcome, transport="gloo"
            )
            for outcome in ("ok", "checksum")
        }
        assert outcomes["checksum"] == len(changed) == is_attacked
        assert outcomes["ok"] >= (not is_attacked)
        await cluster.until_idle()
    async with mini_cluster(tiny_model, redis_url, transport="grpc") as reference:
        assert (await reference.answer(PROMPT, SAMPLING)).token_ids == first.token_ids


FIRST: dict[str, Any] = {
    "Prefills": prefill_pb2.PrefillsRequest(),
    "Handoffs": decode_pb2.HandoffsRequest(),
    "Transfer": transfer_pb2.TransferRequest(),
}
"""What callers of these, whose requests are streams, begin with."""
Said = Iterator[Any] | None
CALLS: dict[str, Callable[[grpc.aio.Channel, Said], Any]] = {
    "Prefills": lambda channel, said: prefill_pb2_grpc.PrefillServiceStub(channel).Prefills(
        said, timeout=DEADLINE_S
    ),
    "Handoffs": lambda channel, said: decode_pb2_grpc.DecodeServiceStub(channel).Handoffs(
        said, timeout=DEADLINE_S
    ),
    "Abort": lambda channel, _: decode_pb2_grpc.DecodeServiceStub(channel).Abort(
        decode_pb2.AbortRequest(request_id="r"), timeout=DEADLINE_S
    ),
    "StreamTokens": lambda channel, _: decode_pb2_grpc.DecodeServiceStub(channel).StreamTokens(
        decode_pb2.StreamTokensRequest(router_id="r"), timeout=DEADLINE_S
    ),
    "Transfer": lambda channel, said: transfer_pb2_grpc.TransferServiceStub(channel).Transfer(
        said, timeout=DEADLINE_S
    ),
    "Pull": lambda channel, _: transfer_pb2_grpc.TransferServiceStub(channel).Pull(
        transfer_pb2.PullRequest(), timeout=DEADLINE_S
    ),
    "Drain": lambda channel, _: control_pb2_grpc.ControlServiceStub(channel).Drain(
        control_pb2.DrainRequest(), timeout=DEADLINE_S
    ),
    "ChangeRole": lambda channel, _: control_pb2_grpc.ControlServiceStub(channel).ChangeRole(
        control_pb2.ChangeRoleRequest(), timeout=DEADLINE_S
    ),
    "DropCache": lambda channel, _: cache_pb2_grpc.CacheServiceStub(channel).DropCache(
        cache_pb2.DropCacheRequest(), timeout=DEADLINE_S
    ),
}
"""Every method of a worker's control plane."""
ALLOWED: dict[PeerRole, set[str]] = {
    "router": {"Prefills", "Abort", "StreamTokens", "Drain", "ChangeRole", "DropCache"},
    "worker": {"Handoffs", "Transfer", "Pull"},
    "supervisor": {"Drain", "ChangeRole"},
    "client": set(),
    "monitor": set(),
}


def address_of(cluster: MiniCluster, slot: str = "decode-0") -> str:
    record = cluster.workers[slot].record
    assert record is not None
    return record.address


async def code_of(
    channel: grpc.aio.Channel, method: str, *, refused: bool = False
) -> grpc.StatusCode:
    """How a call ends; OK where it was let in and there is something to read.

    A caller that is to be ``refused`` writes nothing on a stream: grpc.aio reports INTERNAL
    for a call that ends amid a write.
    """
    is_silent = refused and method in FIRST
    said = None if is_silent or method not in FIRST else iter([FIRST[method]])
    call: Any = CALLS[method](channel, said)
    try:
        if is_silent:
            return await call.code()  # type: ignore[no-any-return]
        if isinstance(call, grpc.aio.UnaryUnaryCall):
            await call
        elif await call.read() is grpc.aio.EOF:
            return await call.code()  # type: ignore[no-any-return]
    except grpc.aio.AioRpcError as error:
        return error.code()
    finally:
        call.cancel()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("role", ["supervisor", "worker", "client", "monitor", "router"])
async def test_a_role_may_call_what_is_its_own(
    cluster: MiniCluster, authority: Authority, role: PeerRole
) -> None:
    """What it may not call is refused for its role; what it may is judged by what was said."""
    files = TlsFiles.in_folder(authority.folder, role)
    async with open_channel(address_of(cluster), files, "worker") as channel:
        for method in CALLS.keys() - ALLOWED[role]:
            code = await code_of(channel, method, refused=True)
            assert code is grpc.StatusCode.PERMISSION_DENIED, method
        for method in ALLOWED[role] - {"Drain", "ChangeRole", "Prefills"}:
            assert await code_of(channel, method) is not grpc.StatusCode.PERMISSION_DENIED, method
    assert {method for method in CALLS if role in callers_of(_path(method))} == ALLOWED[role]


def _path(method: str) -> str:
    services = {"Prefills": "Prefill", "DropCache": "Cache", "Drain": "Control"}
    services |= {"ChangeRole": "Control", "Transfer": "Transfer", "Pull": "Transfer"}
    return f"/baton.v1.{services.get(method, 'Decode')}Service/{method}"


async def test_strangers_reach_nothing(
    cluster: MiniCluster, authority: Authority, stranger: Authority
) -> None:
    """Without TLS, without a certificate, with one of another authority."""
    foreign = TlsFiles.in_folder(stranger.folder, "router")
    for files in (
        None,
        TlsFiles(authority=authority.certificate),
        TlsFiles(foreign.certificate, foreign.key, authority.certificate),
        foreign,
    ):
        async with open_channel(address_of(cluster), files, "worker") as channel:
            for method in CALLS:
                code = await code_of(channel, method, refused=True)
                assert code is grpc.StatusCode.UNAVAILABLE, (method, files)
    assert len((await cluster.answer(PROMPT, SAMPLING)).token_ids) == 4


async def test_a_router_s_certificate_cannot_play_a_worker(authority: Authority) -> None:
    """A client of a worker wants a worker's certificate, not any of the cluster."""
    worker = TlsFiles.in_folder(authority.folder, "worker")
    outcomes: dict[PeerRole, grpc.StatusCode] = {
        "worker": grpc.StatusCode.UNIMPLEMENTED,
        "router": grpc.StatusCode.UNAVAILABLE,
        "supervisor": grpc.StatusCode.UNAVAILABLE,
    }
    for role, expected in outcomes.items():
        server = make_server()
        port = listen(server, "127.0.0.1:0", TlsFiles.in_folder(authority.folder, role))
        await server.start()
        async with open_channel(f"127.0.0.1:{port}", worker, "worker") as channel:
            assert await code_of(channel, "Pull") is expected, role
        await server.stop(None)


async def test_a_worker_of_another_cluster_gets_no_kv(
    tiny_model: Path, redis_url: str, authority: Authority, stranger: Authority
) -> None:
    """The whole way: a decode worker with foreign certificates stands in the registry."""
    tls = TlsConfig(folder=str(authority.folder))
    async with mini_cluster(
        tiny_model, redis_url, tls=tls, transport="grpc", request_deadline_s=5.0
    ) as cluster:
        await cluster.workers["decode-0"].stop()
        await cluster.until(lambda: not cluster.dispatcher.workers.up("decode"))
        pool = next(pool for pool in cluster.config.pools if pool.role == "decode")
        own = cluster.config
        cluster.config = own.model_copy(update={"tls": TlsConfig(folder=str(stranger.folder))})
        await cluster.start_worker(pool, "decode-0")
        cluster.config = own
        with pytest.raises(BatonError):
            await cluster.answer(PROMPT, SAMPLING)


async def test_metrics_are_for_routers(
    cluster: MiniCluster,
    authority: Authority,
    stranger: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cluster_metrics, "_DEADLINE_S", DEADLINE_S)
    record = cluster.workers["decode-0"].record
    assert record is not None
    registry, address = cluster.metrics.registry, record.metrics_address

    async def page(files: TlsFiles | None) -> str:
        return (await cluster_page(registry, [address], None, MetricsPages(files))).decode()

    assert "1 of 1 workers" in await page(TlsFiles.in_folder(authority.folder, "router"))
    assert "0 of 1 workers" in await page(TlsFiles.in_folder(authority.folder, "client"))
    assert "0 of 1 workers" in await page(TlsFiles.in_folder(stranger.folder, "router"))
    assert "0 of 1 workers" in await page(None)


async def test_the_console_reads_workers_pages_with_a_router_s_certificate(
    cluster: MiniCluster, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_page, "DEADLINE_S", DEADLINE_S)
    record = cluster.workers["decode-0"].record
    assert record is not None
    seen = {}
    for role in ("router", "client", None):
        files = None if role is None else TlsFiles.in_folder(authority.folder, role)
        pages = WorkerPages(MetricsPages(files))
        seen[role] = await pages.read({"decode-0": record.metrics_address})
        await pages.close()
    assert seen["router"]["decode-0"].batch_fill is not None
    assert (seen["client"], seen[None]) == ({}, {})
