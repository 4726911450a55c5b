"""A worker of each role in a process of its own, and a dispatcher in this one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from baton.config.advanced import AdvancedConfig
from baton.config.choices import Role
from baton.config.cluster import Config
from tests.chaos.harness.worker_child import WorkerChild
from tests.chaos.harness.worker_script import Job
from tests.support.mini_cluster import MiniCluster

ROLES: tuple[Role, ...] = ("prefill", "decode")


@asynccontextmanager
async def worker_processes(
    model: Path, redis_url: str, folder: Path, *, registry_ttl_s: float = 4.0
) -> AsyncIterator[tuple[MiniCluster, list[WorkerChild]]]:
    """Once requests can be served. Yields the processes in the order of ``ROLES``.

    Their logs are in ``folder``.
    """
    config = Config(
        dtype="float32",
        local_prefill="never",
        advanced=AdvancedConfig(
            registry_ttl_s=registry_ttl_s, heartbeat_s=min(1.0, registry_ttl_s / 4)
        ),
    )
    cluster = MiniCluster(config, model, redis_url)
    jobs = [
        Job(
            role,
            f"{role}-0",
            "shm",
            str(model),
            redis_url,
            cluster.cluster_id,
            registry_ttl_s=registry_ttl_s,
        )
        for role in ROLES
    ]
    children = [WorkerChild(job, folder / f"{job.slot}.log") for job in jobs]
    try:
        for child in children:
            await child.ready()
        await cluster.dispatcher.start()
        await cluster.until(lambda: cluster.dispatcher.health()[0] == "ok")
        yield cluster, children
    finally:
        await cluster.stop()
        for child in children:
            child.end()
