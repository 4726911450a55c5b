"""A supervisor over workers that load nothing, on a real Ray; prints what was seen, as JSON.

``supervisor_script.py PLAY ID RUN_DIRECTORY REDIS_URL``. In a process of its own: Ray reads its
environment once, when it is imported.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil

from baton.config.cluster import load_config
from baton.config.pools import PoolConfig
from baton.host.process_end import end_process
from baton.store.redis_client import redis_client
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.run_directory import RUN_VARIABLE, ClusterMark, RunDirectory
from deploy.ray.ray_cluster import RayCluster
from deploy.supervisor.reconciler import Phase
from deploy.supervisor.status_store import SlotStatus, StatusStore, SupervisionStatus
from deploy.supervisor.supervisor_actor import RaySupervisor, SupervisorActor, SupervisorSettings
from deploy.workers.actor_process import RayPlace, keep_native_errors
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.ray_worker import SUPERVISOR_NAME, is_known, place
from deploy.workers.worker_actor import PingReply

DEADLINE_S = 250.0
ANSWER_S = 0.2
NODE_SCRIPT = str(Path(__file__).with_name("node_script.py"))


class LightWorker:
    """Answers, and fails if a file asks for it."""

    def __init__(self, settings_json: str) -> None:
        self._settings = ActorSettings.model_validate_json(settings_json)
        self._leaves = False
        keep_native_errors(RunDirectory(Path(os.environ[RUN_VARIABLE])).stderr(self._settings.slot))

    def ready(self) -> dict[str, Any]:
        run = RunDirectory(Path(os.environ[RUN_VARIABLE]))
        broken = run.log(self._settings.slot).with_suffix(".broken")
        if broken.exists():
            raise ValueError(broken.read_text())
        return {
            "process": asdict(ProcessIdentity.own()),
            "other_ranks": [],
            "node": RayPlace.own().node,
            "config_hash": self._settings.config_hash,
        }

    def ping(self, unlisted_s: float, epoch: int) -> tuple[str, int]:
        run = RunDirectory(Path(os.environ[RUN_VARIABLE]))
        crash = run.log(self._settings.slot).with_suffix(".crash")
        if crash.exists():
            os.write(2, crash.read_bytes())
            crash.unlink()
            os.abort()
        if not self._leaves:
            return PingReply.SERVING.value, epoch
        threading.Timer(ANSWER_S, end_process, (0,)).start()
        return PingReply.LEAVING.value, epoch

    def drain(self, deadline_s: float, epoch: int) -> None:
        self._leaves = True


class LightSupervisor(SupervisorActor):
    """Over such workers."""

    worker_class = LightWorker


class Stage:
    """What a play needs."""

    def __init__(self, play: str, cluster_id: str, folder: str, redis_url: str) -> None:
        self.run = RunDirectory(Path(folder))
        self.mark = ClusterMark(cluster_id, self.run.path)
        self.redis_url = redis_url
        far = {"far": 1.0} if play == "node" else {}
        # What one machine is to offer; the second pool's workers may need another one.
        pools = (
            PoolConfig(name="near", role="prefill", count=2),
            PoolConfig(name="far", role="decode"),
        )
        self.config = load_config().model_copy(update={"pools": pools})
        wanted = (pools[0], pools[1].model_copy(update={"resources": far}))
        described = self.config.model_copy(update={"pools": wanted}).model_dump(mode="json")
        self.settings = tuple(
            self._settings(described, pool.name, f"{pool.name}-{number}")
            for pool in wanted
            for number in range(pool.count)
        )
        self.seen: dict[str, Any] = {}

    def _settings(self, config: dict[str, Any], pool: str, slot: str) -> ActorSettings:
        return ActorSettings(
            config=config,
            pool=pool,
            slot=slot,
            model_path="",
            draft_model_path="",
            model_name="",
            redis_url=self.redis_url,
            cluster_id=self.mark.cluster_id,
            launcher=ProcessIdentity.own(),
        )

    def supervise(self, config_hash: str = "") -> RaySupervisor:
        settings = SupervisorSettings(
            worker=self.settings[0].model_copy(update={"config_hash": config_hash}),
            drain_s=0.0,
            redis_url=self.redis_url,
            cluster_id=self.mark.cluster_id,
            launcher=ProcessIdentity.own(),
        )
        return RaySupervisor.place(settings, LightSupervisor)

    def broken(self, slot: str) -> Path:
        return self.run.log(slot).with_suffix(".broken")

    async def until(self, holds: Callable[[SupervisionStatus], bool]) -> SupervisionStatus:
        """The status, once it is as it should be."""
        async with redis_client(self.redis_url) as client:
            board = StatusStore(client, self.mark.cluster_id)
            while True:
                told = await board.read()
                if told is not None and holds(told):
                    return told
                await asyncio.sleep(0.05)

    async def until_running(self, slot: str, but: int = 0) -> SlotStatus:
        """Until a life with another process id than ``but`` serves."""

        def holds(told: SupervisionStatus) -> bool:
            news = told.slots.get(slot)
            return (
                news is not None and news.state.phase is Phase.RUNNING and news.pid not in (0, but)
            )

        return (await self.until(holds)).slots[slot]

    def pids(self, told: SupervisionStatus) -> dict[str, int]:
        return {slot: news.pid for slot, news in told.slots.items()}


async def lives_and_deaths(stage: Stage, cluster: RayCluster) -> None:
    """The supervisor takes over, replaces, is replaced itself, and does not loop in silence."""
    for settings in stage.settings:
        place(settings, LightWorker)
    supervisor = stage.supervise()
    pid = await supervisor.ready()
    maps = [entry.path for entry in psutil.Process(pid).memory_maps()]
    stage.seen["imports_torch"] = any("torch" in path for path in maps)
    stage.seen["rss_mib"] = psutil.Process(pid).memory_info().rss >> 20
    first = [await stage.until_running(settings.slot) for settings in stage.settings]
    stage.seen["deaths_at_first"] = [news.state.deaths for news in first]
    os.kill(first[0].pid, signal.SIGKILL)
    second = await stage.until_running("near-0", first[0].pid)
    stage.seen["killed"] = second.state.last_error
    before = await stage.until(lambda told: told.pid == pid)
    os.kill(pid, signal.SIGKILL)
    after = await stage.until(
        lambda told: told.pid != pid and stage.pids(told) == stage.pids(before)
    )
    stage.seen["supervisor_replaced"] = after.pid != pid
    stage.seen["deaths_remembered"] = after.slots["near-0"].state.deaths
    crash = stage.broken("near-0").with_suffix(".crash")
    crash.write_text("memory allocation of 9 bytes failed\n")
    crashed = await stage.until_running("near-0", second.pid)
    stage.seen["crashed"] = crashed.state.last_error
    # Both at once: only Ray has seen the worker's death.
    far = after.slots["far-0"].pid
    os.kill(after.pid, signal.SIGKILL)
    os.kill(far, signal.SIGKILL)
    after = await stage.until(lambda told: told.slots["far-0"].pid not in (0, far))
    missed = after.slots["far-0"].state
    stage.seen["missed"] = (missed.deaths, missed.last_error)
    stage.broken("near-1").write_text("there is no such thing")
    os.kill(after.slots["near-1"].pid, signal.SIGKILL)
    # Its last life, and then one that cannot start.
    looping = await stage.until(lambda told: told.slots["near-1"].state.deaths >= 2)
    stage.seen["cannot_start"] = looping.slots["near-1"].state.last_error
    stage.seen["others"] = stage.pids(looping)["near-0"] == crashed.pid
    stage.broken("near-1").unlink()
    await stage.until_running("near-1")


async def lost_node(stage: Stage, cluster: RayCluster) -> None:
    """A worker's node is lost, and another one comes: the worker is replaced there."""
    for settings in stage.settings:
        place(settings, LightWorker)
    await stage.supervise().ready()
    near = await stage.until_running("near-0")
    waiting = await stage.until(lambda told: "far-0" in told.slots)
    stage.seen["waits"] = waiting.slots["far-0"].state.phase.value
    raylet = await second_node(stage)
    first = await stage.until_running("far-0")
    raylet.kill()
    while psutil.pid_exists(first.pid):
        await asyncio.sleep(0.05)
    await second_node(stage)
    second = await stage.until_running("far-0", first.pid)
    stage.seen["replaced"] = second.pid != first.pid
    stage.seen["error"] = second.state.last_error
    stage.seen["near"] = (await stage.until_running("near-0")).pid == near.pid


async def rollout(stage: Stage, cluster: RayCluster) -> None:
    """Another supervisor has another configuration: it replaces workers one by one."""
    slots = {settings.slot for settings in stage.settings}

    def all_run(told: SupervisionStatus) -> bool:
        running = {slot for slot, news in told.slots.items() if news.state.phase is Phase.RUNNING}
        return running == slots and all(stage.pids(told).values())

    for settings in stage.settings:
        place(settings.model_copy(update={"config_hash": "old"}), LightWorker)
    supervisor = stage.supervise("old")
    await supervisor.ready()
    first = stage.pids(await stage.until(all_run))
    supervisor.kill()
    while is_known(SUPERVISOR_NAME):
        await asyncio.sleep(0.05)
    stage.seen["most_down"] = 0
    stage.seen["said"] = ""

    def replaced(told: SupervisionStatus) -> bool:
        down = sum(news.state.phase is not Phase.RUNNING for news in told.slots.values())
        stage.seen["most_down"] = max(stage.seen["most_down"], down)
        errors = [news.state.last_error for news in told.slots.values() if news.state.last_error]
        stage.seen["said"] = stage.seen["said"] or "".join(errors[:1])
        return all_run(told) and not stage.pids(told).items() & first.items()

    await stage.supervise("new").ready()
    last = await stage.until(replaced)
    stage.seen["deaths"] = sum(news.state.deaths for news in last.slots.values())


async def second_node(stage: Stage) -> psutil.Process:
    """The raylet of another node on this machine."""
    import ray  # noqa: PLC0415

    address = ray.get_runtime_context().gcs_address
    command = [NODE_SCRIPT, address, '{"far": 1, "baton_worker": 1}']
    with stage.run.log("node").open("ab") as log:
        node = await asyncio.create_subprocess_exec(
            sys.executable, *command, stdout=asyncio.subprocess.PIPE, stderr=log
        )
    assert node.stdout is not None
    return psutil.Process(int(await node.stdout.readline()))


PLAYS: dict[str, Callable[[Stage, RayCluster], Awaitable[None]]] = {
    "lives": lives_and_deaths,
    "node": lost_node,
    "rollout": rollout,
}


async def main() -> None:
    stage = Stage(*sys.argv[1:])
    cluster = RayCluster(stage.config, stage.mark, stage.run)
    os.environ.update(stage.mark.variables)
    async with asyncio.timeout(DEADLINE_S):
        await cluster.start()
        try:
            await PLAYS[sys.argv[1]](stage, cluster)
        finally:
            await cluster.stop()
    sys.stdout.write(f"\n{json.dumps(stage.seen)}\n")


if __name__ == "__main__":
    asyncio.run(main())
