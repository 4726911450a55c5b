"""Several router processes behind one port, before an echo worker: real processes, no model."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.client.headers import ROUTER_HEADER
from baton.config.cluster import Config
from baton.rpc.grpc_channel import open_channel
from baton.v1 import inference_pb2, inference_pb2_grpc
from deploy.launcher.router_process import RouterProcess
from deploy.processes.run_directory import ClusterMark, RunDirectory
from loadtest.common.json_worker import helper
from tests.support.mini_cluster import free_port

DEADLINE_S = 60.0
REQUESTS = 24


@dataclass
class Routers:
    """Two of them, and how to reach them."""

    config: Config
    processes: tuple[RouterProcess, ...]

    def client(self) -> httpx.AsyncClient:
        """A new connection for each request: the kernel chooses a process for each."""
        return httpx.AsyncClient(
            base_url=f"http://{self.config.http}",
            trust_env=False,
            timeout=DEADLINE_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    async def ask(self, times: int) -> None:
        """Every request must be answered."""
        body = {"model": "echo", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
        async with self.client() as client:
            for _ in range(times):
                answer = await client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                assert answer.json()["usage"]["completion_tokens"] == 4

    async def value(self, name: str, page: str = "/metrics") -> float:
        """A series' sum over its labels, which every process must tell alike."""
        values = set()
        async with self.client() as client:
            for _ in range(6):
                text = (await client.get(page)).text
                families = text_string_to_metric_families(text)
                samples = [sample for family in families for sample in family.samples]
                values.add(sum(sample.value for sample in samples if sample.name == name))
        assert len(values) == 1, f"{name}: {values}"
        return values.pop()

    async def answering(self, times: int = 60) -> set[str]:
        """The numbers of the processes that answer."""
        async with self.client() as client:
            return {(await client.get("/health")).headers[ROUTER_HEADER] for _ in range(times)}


@asynccontextmanager
async def two_routers(model: Path, redis_url: str, **changes: object) -> AsyncIterator[Routers]:
    """``changes`` go to the config."""
    run = RunDirectory.create()
    mark = ClusterMark(secrets.token_hex(4), run.path)
    addresses = {"http": f"127.0.0.1:{free_port()}", "grpc": f"127.0.0.1:{free_port()}"}
    config = Config(routers=2, **addresses, **changes)  # type: ignore[arg-type]
    fields = {
        "redis_url": redis_url,
        "cluster_id": mark.cluster_id,
        "context_length": 512,
        "first_token_id": 40,
    }
    processes = tuple(
        RouterProcess(
            config,
            mark,
            run,
            redis_url=redis_url,
            model_path=str(model),
            model_name="echo",
            number=number,
        )
        for number in range(config.routers)
    )
    log = run.log("echo")
    try:
        async with helper("loadtest.router.echo_worker", fields, log, ready_s=DEADLINE_S):
            await asyncio.gather(*(process.start() for process in processes))
            await asyncio.gather(*(process.healthy() for process in processes))
            yield Routers(config, processes)
    finally:
        await asyncio.gather(*(process.stop() for process in processes))
        run.remove()


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
                assert [model.id for model in models.models] == ["echo"]

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
    """A request whose body comes when its router was told to leave is answered like others."""
    host, _, port = routers.config.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = b'{"model": "echo", "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": true}'
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
