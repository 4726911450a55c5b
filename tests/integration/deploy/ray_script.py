"""Brings a local Ray up as the launcher does and prints what was seen, as JSON.

In a process of its own: Ray reads its environment once, when it is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import grpc
import psutil

from baton.config.cluster import load_config
from baton.host.oom_killer import inherited_oom_score, oom_score
from deploy.processes.run_directory import ClusterMark, RunDirectory
from deploy.ray.ray_cluster import RayCluster
from deploy.ray_internals import is_unplaced
from deploy.workers.ranks import WORKER_RESOURCE

DEADLINE_S = 180.0
MAX_STARTS = 8
STANDBY_S = 20.0


class Echo:
    """A minimal actor."""

    def __init__(self) -> None:
        from deploy.workers.standby import leave_here  # noqa: PLC0415

        # As the supervisor does: else this actor's own process may take the request for a standby.
        leave_here()

    def life(self) -> tuple[int, str]:
        return os.getpid(), os.environ.get("BATON_CLUSTER_ID", "")

    def oom_scores(self) -> tuple[int, int]:
        """That of this process, and of Ray's node manager, which has started it."""
        return oom_score(), inherited_oom_score()

    def imports_from(self) -> list[str]:
        return sys.path

    def request_standby(self) -> None:
        from deploy.workers.standby import StandbyFiles, request_standby  # noqa: PLC0415

        request_standby(StandbyFiles.own())

    def has_standby(self) -> bool:
        from deploy.workers.standby import StandbyFiles  # noqa: PLC0415

        return StandbyFiles.own().lock.is_held()

    def has_imports(self) -> bool:
        """Whether this process has imported what a worker needs."""
        return "worker.process" in sys.modules


class Taker(Echo):
    """An actor that takes its process as a worker does."""

    def __init__(self) -> None:
        from deploy.workers.standby import take_here  # noqa: PLC0415

        take_here()


async def main() -> None:
    run = RunDirectory(Path(sys.argv[2]))
    mark = ClusterMark(sys.argv[1], run.path)
    cluster = RayCluster(load_config(), mark, run)
    seen: dict[str, Any] = {}
    async with asyncio.timeout(DEADLINE_S):
        await cluster.start()
        import ray  # noqa: PLC0415

        needs = {"num_cpus": 0, "resources": {WORKER_RESOURCE: 1}, "max_restarts": -1}
        echo: Any = ray.remote(Echo).options(**needs).remote()
        seen["first"] = await call(echo.life)
        seen["oom scores"] = await call(echo.oom_scores)
        seen["imports from"] = await call(echo.imports_from)
        seen["listening"] = sorted(listening(mark))
        seen["stranger"] = ask_without_token(str(ray.get_runtime_context().gcs_address))
        unused = ("dashboard/dashboard.py", "monitor.py")
        seen["unused"] = [one for one in command_lines(mark) if any(name in one for name in unused)]
        taker = ray.remote(Taker).options(**needs)
        seen["waits for a node"] = await asyncio.to_thread(waiting, ray.remote(Echo), needs)
        seen["standby was taken"] = await takes_standby(echo, taker)
        psutil.Process(seen["first"][0]).kill()
        seen["second"] = await next_life(echo, seen["first"][0])
        raylet = next(c for c in psutil.Process().children() if c.name() == "raylet")
        raylet.kill()
        seen["lost"] = await cluster.lost()
        seen["stopped"] = await cluster.stop()
    sys.stdout.write(json.dumps(seen))


def waiting(actor: Any, needs: dict[str, Any]) -> list[bool]:
    """Whether an actor waits that no node has room for, and one that runs."""
    unplaced = actor.options(**{**needs, "num_cpus": 1_000}).remote()
    placed = actor.options(**needs).remote()
    import ray  # noqa: PLC0415

    ray.get(placed.life.remote(), timeout=DEADLINE_S)
    found = [is_unplaced(unplaced), is_unplaced(placed)]
    for one in (unplaced, placed):
        ray.kill(one)
    return found


async def takes_standby(echo: Any, taker: Any) -> bool:
    """Whether a worker that is placed once there is a standby has all its imports.

    Or one of the next workers: Ray may have another idle process, which it started for itself.
    """
    takers = []
    for _ in range(MAX_STARTS):
        # Ray may have ended an earlier standby among many idle processes.
        while not await call(echo.has_standby):
            await call(echo.request_standby)
            await wait_for_standby(echo)
        # Each taker stays, and keeps its process.
        takers.append(taker.remote())
        if await call(takers[-1].has_imports):
            return True
    return False


async def wait_for_standby(echo: Any) -> None:
    """Until there is a standby, for at most ``STANDBY_S``."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(STANDBY_S):
            while not await call(echo.has_standby):
                await asyncio.sleep(0.1)


async def call(method: Any) -> Any:
    return await asyncio.wrap_future(method.remote().future())


def ask_without_token(address: str) -> str:
    """How the control store answers a client that only knows its address."""
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
            pid, mark = await call(echo.life)
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
