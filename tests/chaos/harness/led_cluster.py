"""The cluster under test in a Ray cluster that Baton did not start, with two launchers.

One leads, the other waits. Workers, router and store outlive both. All are on this machine;
`tests/e2e/test_launchers.py` has machines that are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from deploy.processes.run_directory import RunDirectory
from deploy.ray.joined_ray import joined_environment
from tests.chaos.harness.cluster import COUNT, ROLES, Cluster
from tests.chaos.harness.stale_orders import StaleOrders
from tests.chaos.load.call import Fronts
from tests.support.e2e.cluster import (
    BATON,
    END_S,
    LEADS_AGAIN,
    LIVES_ON,
    START_S,
    WAITS,
    UpProcess,
    processes_of,
    told_by,
    wait_healthy,
)
from tests.support.e2e.network import RAY
from tests.support.mini_cluster import free_port

ROOT = Path(__file__).parents[3]
LAUNCHERS = 2
_LOOK_S = 0.1
_SUPERVISOR = "ray::SupervisorActor"
# A drained worker and its successor overlap.
_PLACES = 2 * COUNT * len(ROLES)


class LedCluster(Cluster):
    """Use it as a context."""

    # Two routers at one port need a launcher that starts both, and would end with it.
    routers = 1
    configured = f'ray_address = "auto"\ninsecure_listen = true\n{LIVES_ON}'

    def __init__(self) -> None:
        super().__init__()
        self.launchers: list[UpProcess] = []
        """Both, or what is left of them."""
        self._file = Path()
        self._variables: dict[str, str] = {}
        self._ray: subprocess.Popen[bytes] | None = None
        self._router: UpProcess | None = None

    # The cluster's life

    def _start(self, file: Path, variables: Mapping[str, str]) -> None:
        self._cluster_id = f"chaos-{secrets.token_hex(4)}"
        token = self.folder / "token"
        token.write_text(secrets.token_hex(32))
        port = free_port()
        self._file = file
        self._variables = {
            **variables,
            **joined_environment(),
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "BATON_CLUSTER_ID": self._cluster_id,
        }
        self._start_ray(port)
        first = self.launch().wait_ready()
        fronts = [f"127.0.0.1:{free_port()}" for _ in range(2)]
        where = ("--config", str(file), "--http", fronts[0], "--grpc", fronts[1])
        self._router = UpProcess(*where, env=self._variables, program=(BATON, "router"))
        self.fronts = Fronts(fronts[0], fronts[1], first.model)
        wait_healthy(f"http://{fronts[0]}")
        self.launch()
        _until(lambda: self.is_led, "the second launcher does not wait")

    def _start_ray(self, port: int) -> None:
        where = ("--node-ip-address", "127.0.0.1", "--port", str(port))
        ports = ("--ray-client-server-port", str(free_port()), "--include-dashboard", "false")
        offered = ("--num-cpus", "0", "--resources", f'{{"baton_worker": {_PLACES}}}')
        files = ("--temp-dir", str(self.folder / "r"), "--object-store-memory", str(80 << 20))
        log = self.folder / "ray.log"
        with log.open("wb") as output:
            self._ray = subprocess.Popen(
                [RAY, "start", "--head", "--block", *where, *ports, *offered, *files],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | self._variables | {"RAY_ADDRESS": ""},
                start_new_session=True,
            )
        _until(lambda: "Ray runtime started" in log.read_text(), "Ray does not start")

    def launch(self) -> UpProcess:
        """Start a launcher."""
        self.launchers.append(UpProcess("--config", str(self._file), env=self._variables))
        return self.launchers[-1]

    def _end(self) -> None:
        """Ctrl-C for the launcher that leads ends the workers; the rest is ended after it."""
        for standby in [one for one in self.launchers if not _leads(one)]:
            standby.__exit__(None, None, None)
            self.launchers.remove(standby)
        for leader in self.launchers:
            leader.interrupt()
            with contextlib.suppress(subprocess.TimeoutExpired):
                leader.wait()
            leader.__exit__(None, None, None)
        self.left = self._actors() if self.launchers else []
        if self._router is not None:
            self._router.__exit__(None, None, None)
        if self._ray is not None:
            self._ray.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._ray.wait(END_S)
            for process in processes_of(self._cluster_id):
                with contextlib.suppress(psutil.Error):
                    process.kill()
            self._ray.wait(END_S)
        self._node.remove()

    @property
    def _node(self) -> RunDirectory:
        return RunDirectory.of_node(self._cluster_id)

    def save_logs(self, folder: Path) -> None:
        """Copy the processes' logs to a folder."""
        shutil.copytree(self._node.logs, folder, dirs_exist_ok=True)
        parts = {f"launcher-{number}": one for number, one in enumerate(self.launchers)}
        if self._router is not None:
            parts["router-0"] = self._router
        for name, part in parts.items():
            (folder / f"{name}.txt").write_text(part.text)

    def _routers(self) -> dict[str, int]:
        return {} if self._router is None else {"router-0": self._router.process.pid}

    # Who leads

    @property
    def is_led(self) -> bool:
        """Whether both launchers are there, and say that one leads and the other waits."""
        leading = [_leads(one) for one in self.launchers if one.process.poll() is None]
        return len(leading) == LAUNCHERS and set(leading) == {True, False}

    @property
    def up(self) -> UpProcess:
        """The launcher that leads."""
        return next(one for one in self.launchers if _leads(one))

    async def epoch(self) -> int:
        """Of the present supervisor's orders; 0 where the store knows of none. Raises
        ``redis.RedisError``."""
        return int(await self.store.client.get(f"{self.key_prefix}supervisor-epoch") or 0)

    def supervisors(self) -> list[psutil.Process]:
        """Their processes: one, unless an old one has not ended."""
        lines = told_by(self._cluster_id, lambda process: (process, process.cmdline()))
        return [process for process, line in lines if " ".join(line).startswith(_SUPERVISOR)]

    def kill(self, launcher: UpProcess) -> None:
        """SIGKILL; its machine's processes end with it."""
        launcher.kill()
        launcher.__exit__(None, None, None)
        self.launchers.remove(launcher)

    def stop(self, launcher: UpProcess) -> None:
        """SIGSTOP."""
        launcher.process.send_signal(signal.SIGSTOP)

    def resume(self, launcher: UpProcess) -> None:
        """SIGCONT."""
        launcher.process.send_signal(signal.SIGCONT)

    async def give_stale_orders(self, epoch: int) -> StaleOrders:
        """Order all workers to drain, and the supervisor to stop, as one whose epoch this was.

        Raises AssertionError where Ray does not answer.
        """
        asked = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.chaos.harness.stale_orders"),
            *(self._cluster_id, str(epoch)),
            cwd=ROOT,
            # The module is below the current folder.
            env=os.environ | self._variables | {"PYTHONSAFEPATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        said, trouble = await asked.communicate()
        assert asked.returncode == 0, trouble.decode(errors="replace")[-2000:]
        return StaleOrders(**json.loads(said.splitlines()[-1]))


def _leads(launcher: UpProcess) -> bool | None:
    """Whether a launcher leads, by the last line that tells; None before there is one."""
    for line in reversed(launcher.output.copy()):
        if WAITS in line:
            return False
        if LEADS_AGAIN in line or line.startswith("ready in"):
            return True
    return None


def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + START_S
    while not holds():
        if time.monotonic() > end:
            raise AssertionError(f"{what} within {START_S:.0f} s")
        time.sleep(_LOOK_S)
