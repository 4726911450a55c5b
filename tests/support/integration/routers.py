"""Shared by the tests of routers and by other tests."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from baton.client.headers import ROUTER_HEADER
from baton.config.cluster import Config
from deploy.launcher.router_process import RouterProcess
from deploy.processes.run_directory import ClusterMark, RunDirectory
from loadtest.common.json_worker import helper
from loadtest.common.peer_servers import SERVED_NAME
from tests.support.mini_cluster import free_port

DEADLINE_S = 60.0


@dataclass
class Routers:
    """Two of them, and how to reach them."""

    config: Config
    cluster_id: str
    processes: tuple[RouterProcess, ...]
    run: RunDirectory
    process_of: Callable[[int, Config], RouterProcess]

    def client(self) -> httpx.AsyncClient:
        """A new connection for each request: the kernel chooses a process for each."""
        return httpx.AsyncClient(
            base_url=f"http://{self.config.http}",
            trust_env=False,
            timeout=DEADLINE_S,
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    @asynccontextmanager
    async def another(self) -> AsyncIterator[str]:
        """The HTTP address of one more, with ports of its own, as on another host."""
        http, grpc = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
        fields = {"http": http, "grpc": grpc, "routers": 1}
        process = self.process_of(len(self.processes), self.config.model_copy(update=fields))
        try:
            await process.start()
            await process.healthy()
            yield http
        finally:
            await process.stop()

    async def ask(self, times: int) -> None:
        """Every request must be answered."""
        body = {"model": SERVED_NAME, "prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True}
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
                every = [sample for family in families for sample in family.samples]
                samples = [sample for sample in every if sample.name == name]
                for sample in samples:
                    assert sample.labels["cluster"] == self.cluster_id
                    assert sample.labels["model_name"] == SERVED_NAME
                values.add(sum(sample.value for sample in samples))
        assert len(values) == 1, f"{name}: {values}"
        return values.pop()

    async def answering(self, times: int = 60) -> set[str]:
        """The numbers of the processes that answer."""
        async with self.client() as client:
            return {(await client.get("/health")).headers[ROUTER_HEADER] for _ in range(times)}


@asynccontextmanager
async def two_routers(model: Path, redis_url: str, /, **changes: object) -> AsyncIterator[Routers]:
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

    def process_of(number: int, config: Config) -> RouterProcess:
        return RouterProcess(
            config,
            mark,
            run,
            redis_url=redis_url,
            model_path=str(model),
            model_name=SERVED_NAME,
            number=number,
        )

    processes = tuple(process_of(number, config) for number in range(config.routers))
    log = run.log("echo")
    try:
        async with helper("loadtest.router.echo_worker", fields, log, ready_s=DEADLINE_S):
            await asyncio.gather(*(process.start() for process in processes))
            await asyncio.gather(*(process.healthy() for process in processes))
            yield Routers(config, mark.cluster_id, processes, run, process_of)
    finally:
        await asyncio.gather(*(process.stop() for process in processes))
        run.remove()
