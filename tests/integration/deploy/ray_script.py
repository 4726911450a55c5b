"""Brings a local Ray up as the launcher does and prints what was seen, as JSON.

In a process of its own: Ray reads its environment once, when it is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import psutil

from baton.config.cluster import load_config
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.ray.ray_cluster import RayCluster
from deploy.workers.ranks import WORKER_RESOURCE

DEADLINE_S = 180.0
MAX_STARTS = 8
STANDBY_S = 20.0


class Echo:
    """The least of actors."""

    def life(self) -> tuple[int, str]:
        return os.getpid(), os.environ.get("BATON_CLUSTER_ID", "")

    def request_standby(self) -> None:
        from deploy.workers.standby import StandbyFiles, request_standby  # noqa: PLC0415

        request_standby(StandbyFiles.own())

    def somebody_stands_by(self) -> bool:
        from deploy.workers.standby import StandbyFiles  # noqa: PLC0415

        return StandbyFiles.own().lock.is_held()

    def take(self) -> bool:
        """Whether what a worker needs was there before."""
        from deploy.workers.standby import take_here  # noqa: PLC0415

        take_here()
        return "worker.process" in sys.modules


async def main() -> None:
    run = RunDirectory(Path(sys.argv[2]))
    mark = ClusterMark(sys.argv[1], run.path)
    cluster = RayCluster(load_config(), mark, run)
    seen: dict[str, Any] = {}
    async with asyncio.timeout(DEADLINE_S):
        await cluster.start()
        import ray  # noqa: PLC0415

        actor = ray.remote(Echo)
        options = actor.options(num_cpus=0, resources={WORKER_RESOURCE: 1}, max_restarts=-1)
        echo: Any = options.remote()
        seen["first"] = await asyncio.wrap_future(echo.life.remote().future())
        seen["listening"] = sorted(listening(mark))
        seen["stranger"] = ask_without_token(str(ray.get_runtime_context().gcs_address))
        unused = ("dashboard/dashboard.py", "monitor.py")
        seen["unused"] = [one for one in command_lines(mark) if any(name in one for name in unused)]
        if "standby" in sys.argv:
            seen["prepared"] = await prepared(echo, options)
        psutil.Process(seen["first"][0]).kill()
        seen["second"] = await next_life(echo, seen["first"][0])
        raylet = next(c for c in psutil.Process().children() if c.name() == "raylet")
        raylet.kill()
        seen["lost"] = await cluster.lost()
        seen["stopped"] = await cluster.stop()
    sys.stdout.write(json.dumps(seen))


async def prepared(echo: Any, options: Any) -> bool:
    """Whether who comes once somebody stands by has all that a worker needs.

    Or one of the next: Ray may have another process in stock, which it had begun for itself.
    """

    async def asked(call: Any) -> Any:
        return await asyncio.wrap_future(call.remote().future())

    comers = []
    for _ in range(MAX_STARTS):
        # Whoever stood by may have been one that Ray ends when it has many.
        while not await asked(echo.somebody_stands_by):
            await asked(echo.request_standby)
            await stands_by(lambda: asked(echo.somebody_stands_by))
        # They stay, so that each takes a process out of the stock.
        comers.append(options.remote())
        if await asked(comers[-1].take):
            return True
    return False


async def stands_by(look: Callable[[], Awaitable[bool]]) -> None:
    """Once somebody does, or after a while."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STANDBY_S):
            while not await look():
                await asyncio.sleep(0.1)


def ask_without_token(address: str) -> str:
    """How the control store answers somebody who only knows where it is."""
    with grpc.insecure_channel(address) as channel:
        ask: Any = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        code: grpc.StatusCode = ask.future(b"", timeout=DEADLINE_S).code()
        return code.name


def command_lines(mark: ClusterMark) -> list[str]:
    lines = []
    for process in mark.processes():
        with contextlib.suppress(psutil.Error):  # it ends meanwhile
            lines.append(" ".join(process.cmdline()))
    return lines


async def next_life(echo: Any, old: int) -> tuple[int, str]:
    from ray.exceptions import RayError  # noqa: PLC0415

    while True:
        try:
            pid, mark = await asyncio.wrap_future(echo.life.remote().future())
        except RayError:
            continue
        if pid != old:
            return pid, mark


def listening(mark: ClusterMark) -> set[str]:
    """The hosts on which the cluster's processes listen, this one among them."""
    hosts = set()
    for process in [*mark.processes(), psutil.Process()]:
        with contextlib.suppress(psutil.Error):  # it ends meanwhile
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    hosts.add(getattr(connection.laddr, "ip", "").removeprefix("::ffff:"))
    return hosts


if __name__ == "__main__":
    asyncio.run(main())
