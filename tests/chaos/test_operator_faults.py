from __future__ import annotations

import asyncio
import json
import os
import sys
from types import SimpleNamespace
from typing import Any, cast

from tests.chaos.faults.operator_faults import RoleChanged, WorkerDrained
from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.victim import Victim
from tests.chaos.load.call import Fronts

DEADLINE_S = 60.0
RESET = ""
REFUSED = "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
DONE = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\n{}"


class Routers:
    """Gives ``answers`` one after the other, then ``DONE``; keeps what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, dict[str, Any]]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        body = json.loads(await reader.readexactly(size))
        self.asked.append((head.split()[1], body))
        writer.write((self.answers.pop(0) if self.answers else DONE).encode())
        writer.close()


async def cluster_of(routers: Routers) -> tuple[Cluster, asyncio.Server]:
    server = await asyncio.start_server(routers.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]

    async def workers() -> list[object]:
        return []

    fronts = Fronts(f"127.0.0.1:{port}", "", "")
    return cast(Cluster, SimpleNamespace(fronts=fronts, workers=workers)), server


async def test_a_role_is_changed_and_changed_back_whatever_router_dies_meanwhile() -> None:
    routers = Routers(RESET, REFUSED)
    cluster, server = await cluster_of(routers)
    async with server, asyncio.timeout(DEADLINE_S):
        fault = RoleChanged(cluster, Victim("decode-1", 1, os.getpid()))
        await fault.prepare()
        await fault.strike()
        await fault.heal()
        assert not await fault.is_over()
    path = "/v1/workers/decode-1/role"
    roles = [body["role"] for asked, body in routers.asked if asked == path]
    assert roles == ["prefill", "prefill", "prefill", "decode"]
    assert len(routers.asked) == len(roles)
    assert fault.complaints == []


async def test_a_worker_that_has_gone_is_drained_and_its_successor_is_not() -> None:
    gone = await asyncio.create_subprocess_exec(sys.executable, "-c", "")
    await gone.wait()
    routers = Routers()
    cluster, server = await cluster_of(routers)
    async with server, asyncio.timeout(DEADLINE_S):
        fault = WorkerDrained(cluster, Victim("decode-1", 1, gone.pid))
        await fault.prepare()
        await fault.strike()
        await fault.heal()
    assert routers.asked == []
    assert fault.complaints == []
