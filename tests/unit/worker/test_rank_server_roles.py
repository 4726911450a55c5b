"""Which callers a rank accepts where the cluster has certificates: only workers."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton.rpc.grpc_channel import open_channel
from baton.rpc.worker_plane import WorkerPlane
from baton.security.tls import PeerRole
from baton.v1 import rank_pb2, rank_pb2_grpc
from tests.support.certificates import Authority
from worker.exchange.rank_server import RankServer

DEADLINE_S = 60.0


@pytest.mark.parametrize("role", ["worker", "router", "client"])
async def test_only_workers_may_join_a_rank(tmp_path: Path, role: PeerRole) -> None:
    authority = Authority(tmp_path)
    with ThreadPoolExecutor(1) as executor:
        plane = WorkerPlane(authority.sign("rank", "worker"))
        server = RankServer(lambda _: (), executor, plane=plane)
        await server.start()
        try:
            files = authority.sign("caller", role)
            async with open_channel(server.address, files, "worker") as channel:
                # A refused caller writes nothing: grpc.aio reports INTERNAL for a call that ends
                # amid a write.
                requests = iter([rank_pb2.JoinRequest()]) if role == "worker" else None
                call = rank_pb2_grpc.RankServiceStub(channel).Join(requests, timeout=DEADLINE_S)
                code = await call.code()
        finally:
            await server.close()
    assert (code is grpc.StatusCode.PERMISSION_DENIED) == (role != "worker"), code
