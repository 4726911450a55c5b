"""`baton serve` as a child of the tests: on free ports, watched, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
import psutil

from deploy.processes.cluster_state import ClusterState, running_clusters

T = TypeVar("T")
BATON = str(Path(sys.executable).with_name("baton"))
START_S = 240.0
END_S = 120.0
SECRET = "planted-secret-of-clusters-in-tests"
"""The cluster's secret where processes of another launch join the shared cluster."""
WAITS = "this one waits"
"""What a launcher prints while another one leads the cluster."""
LEADS_AGAIN = "leads the cluster again"
LIVES_ON = "routers = 0\nleave_workers = true"
"""The configuration of launchers without which the cluster serves."""
PATIENT = {
    "BATON_ADVANCED__HANG_S": "20",
    "BATON_ADVANCED__LEASE_S": "20",
    "BATON_ADVANCED__REGISTRY_TTL_S": "20",
}
"""For clusters whose tests are about other things: a busy machine makes no worker seem to hang, or
to be gone."""


class UpProcess:
    """One `baton serve`. ``output`` holds what it has printed so far."""

    def __init__(
        self,
        *arguments: str,
        env: Mapping[str, str] | None = None,
        program: Sequence[str] = (BATON, "serve"),
        folder: Path | None = None,
        has_fronts: bool = True,
    ) -> None:
        """Start it with ``arguments``, and on free ports unless these name some.

        ``folder`` is its current folder; None: that of the tests. ``has_fronts``: whether clients
        reach it, as they do not reach a worker.
        """
        command = [*program, *arguments]
        for flag in ("--http", "--grpc") if has_fronts else ():
            if flag not in arguments:
                command += [flag, "127.0.0.1:0"]
        self.output: list[str] = []
        self._lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._state: ClusterState | None = None
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            # A group of its own, which gets the terminal's Ctrl-C as a whole.
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                # Its guardian sees to the rest.
                self.process.kill()
                self.wait()
        self._reader.join(END_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def text(self) -> str:
        """Everything printed so far."""
        return "\n".join(self.output)

    @property
    def state(self) -> ClusterState:
        """What the cluster says of itself: addresses, process ids, run directory."""
        found = [state for state in running_clusters() if state.launcher.pid == self.process.pid]
        if found:
            self._state = found[0]
        assert self._state is not None, f"no state file; it printed:\n{self.text}"
        return self._state

    @property
    def http(self) -> str:
        """``http://host:port`` of the HTTP front."""
        return f"http://{self.state.http}"

    @property
    def grpc(self) -> str:
        """host:port of the gRPC front."""
        return self.state.grpc

    @property
    def model(self) -> str:
        return self.state.model

    @property
    def cluster_id(self) -> str:
        return self.state.cluster_id

    @property
    def logs(self) -> Path:
        return Path(self.state.run_directory) / "logs"

    def wait_ready(self, deadline_s: float = START_S) -> Self:
        """Until it says that it is ready; fails when it ends or says nothing in time."""
        self.wait_for("ready", deadline_s)
        assert self.state.launcher.pid == self.process.pid
        return self

    def wait_for(self, start: str, deadline_s: float = START_S) -> str:
        """The next line that begins with ``start``."""
        end = time.monotonic() + deadline_s
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, end - time.monotonic()))
            except queue.Empty:
                raise AssertionError(
                    f"no line {start!r} in time; it printed:\n{self.text}"
                ) from None
            assert line is not None, f"it ended without a line {start!r}:\n{self.text}"
            if line.startswith(start):
                return line

    def forget_output(self) -> None:
        """Have ``wait_for`` pass over what was printed until now."""
        while not self._lines.empty():
            assert self._lines.get() is not None, f"it has ended:\n{self.text}"

    def wait_healthy(self, deadline_s: float = START_S) -> None:
        """Until /health answers 200."""
        wait_healthy(self.http, deadline_s)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT for the whole group of processes in the foreground."""
        os.killpg(self.process.pid, signal.SIGINT)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)

    def wait(self, deadline_s: float = END_S) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired."""
        code = self.process.wait(deadline_s)
        self._reader.join(deadline_s)
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.rstrip("\n"))
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


def wait_healthy(url: str, deadline_s: float = START_S) -> None:
    """Until the /health of a front answers 200."""
    end = time.monotonic() + deadline_s
    last = ""
    with httpx.Client(trust_env=False, timeout=5.0) as client:
        while time.monotonic() < end:
            try:
                answer = client.get(f"{url}/health")
            except httpx.HTTPError as error:
                last = str(error)
            else:
                last = answer.text
                if answer.status_code == httpx.codes.OK:
                    return
            time.sleep(0.1)
    raise AssertionError(f"not healthy in time: {last}")


def processes_of(cluster_id: str) -> list[psutil.Process]:
    """Every process on this machine whose environment carries the cluster's id."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("BATON_CLUSTER_ID") == cluster_id:
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def wait_until_gone(cluster_id: str, deadline_s: float = END_S) -> list[psutil.Process]:
    """Wait for the end of the cluster's processes; returns those that are left."""
    end = time.monotonic() + deadline_s
    while (left := processes_of(cluster_id)) and time.monotonic() < end:
        psutil.wait_procs(left, timeout=max(0.0, end - time.monotonic()))
    return left


def told_by(cluster_id: str, ask: Callable[[psutil.Process], T]) -> list[T]:
    """The output of every process of the cluster, except of those that end meanwhile."""
    told = []
    for process in processes_of(cluster_id):
        with contextlib.suppress(psutil.Error):
            told.append(ask(process))
    return told


def guardian(cluster_id: str) -> psutil.Process:
    lines = told_by(cluster_id, lambda process: (process, process.cmdline()))
    return next(process for process, line in lines if "deploy.launcher.guardian" in line)
