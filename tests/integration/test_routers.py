"""Several router processes behind one port, before an echo worker: real processes, no model."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx

from baton.rpc.grpc_channel import open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from deploy.launcher.router_process import RouterProcess
from loadtest.common.peer_servers import SERVED_NAME
from tests.support.integration.routers import DEADLINE_S, Routers, two_routers

REQUESTS = 24


async def test_two_processes_are_one_router(tiny_model: Path, redis_url: str) -> None:
    async with two_routers(tiny_model, redis_url) as routers:
        assert await routers.answering() == {"0", "1"}
        await routers.ask(REQUESTS)
        for page in ("/metrics", "/metrics/cluster"):
            assert await routers.value("baton_requests_total", page) == REQUESTS
            assert await routers.value("baton_generated_tokens_total", page) == 4 * REQUESTS
            count = "baton_time_to_first_token_seconds_count"
            assert await routers.value(count, page) == REQUESTS
            assert await routers.value("baton_active_requests", page) == 0
        assert await routers.value("baton_routable_workers") == 2
        for _ in range(4):
            async with open_channel(routers.config.grpc) as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                request = inference_pb2.ListModelsRequest()
                models = await stub.ListModels(request, timeout=DEADLINE_S)
                assert [model.id for model in models.models] == [SERVED_NAME]

        first, second = routers.processes
        os.kill(first.pid, signal.SIGKILL)
        assert await first.wait() == "SIGKILL"
        assert await routers.answering(20) == {"1"}
        await routers.ask(REQUESTS)
        assert await routers.value("baton_requests_total") == 2 * REQUESTS, "counts outlive it"
        assert await routers.value("baton_routable_workers") == 2, "its gauges do not"
        await first.start()
        await first.healthy()
        assert await routers.answering() == {"0", "1"}
        assert await routers.value("baton_requests_total") == 2 * REQUESTS

        os.kill(second.pid, signal.SIGTERM)
        assert await second.wait() == "exit code 0"
        await routers.ask(4)
        await _left_while_it_reads(routers, first)


async def _left_while_it_reads(routers: Routers, last: RouterProcess) -> None:
    """A request whose body arrives while its router leaves is answered like others."""
    host, _, port = routers.config.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"model": "m", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": true}'
    head = "POST /v1/completions HTTP/1.1", f"host: {host}", "content-type: application/json"
    lines = [*head, f"content-length: {len(body)}", "", ""]
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write("\r\n".join(lines).encode() + body[:9])
            await writer.drain()
            # It has accepted the connection once it answers those that came later.
            await routers.ask(2)
            os.kill(last.pid, signal.SIGTERM)
            await asyncio.sleep(1.0)
            writer.write(body[9:])
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200"), answer
            assert b'"completion_tokens":4' in answer.replace(b" ", b"")
            assert await last.wait() == "exit code 0"
    finally:
        writer.close()


async def test_any_router_of_the_cluster_says_why(tiny_model: Path, redis_url: str) -> None:
    body = {"model": SERVED_NAME, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
    names = [f"mine-{number}" for number in range(8)]
    async with two_routers(tiny_model, redis_url) as routers:
        async with routers.client() as client:
            for name in names:
                headers = {"x-request-id": name}
                answer = await client.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == 200, answer.text
        async with routers.another() as asked:
            await _finds_all(asked, names)


async def _finds_all(asked: str, names: Sequence[str]) -> None:
    """A router that has served none of them."""
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as client:
        told = [(await client.get(f"http://{asked}/v1/requests/{name}")).json() for name in names]
    assert {(one["answered"], one["routers"]) for one in told} == {(3, 3)}
    found = [one["data"] for one in told]
    assert [[one["request_id"] for one in data] for data in found] == [[name] for name in names]
    assert {one["router"] for data in found for one in data} <= {
        f"router-{number}@{socket.gethostname()}" for number in range(2)
    }
    for name in (names[0], "another"):
        command = [sys.executable, "-m", "baton", "why", name, "--http", asked]
        result = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=DEADLINE_S
        )
        if name == "another":
            assert "3 of 3 router processes answered" in result.stderr
        else:
            assert f"x-request-id {name}" in result.stdout, result.stderr
            assert "attempt 0" in result.stdout
