"""The cluster under test: two workers of each role, two routers, and a store behind a proxy.

Owned by one event loop; `baton serve` is a child of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from unittest.mock import patch

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from baton.client.headers import ROUTER_HEADER
from baton.config.choices import Role
from baton.store.registry import Registry, WorkerRecord
from tests.chaos.harness.clock import Clock, NoClock
from tests.chaos.harness.memory_group import MemoryGroup, NoMemoryGroup
from tests.chaos.harness.proxy import Proxy
from tests.chaos.harness.store import Store
from tests.chaos.load.call import Fronts
from tests.support.e2e.cluster import UpProcess, processes_of, told_by
from tests.support.small_disk import SmallDisk, small_disk

ROLES: tuple[Role, ...] = ("prefill", "decode")
COUNT = 2
"""Of workers of each role, and of routers: one, and a spare."""
ACTORS = ("WorkerActor", "SupervisorActor")
"""By these names of Ray's processes workers and supervisors are known."""
log = logging.getLogger(__name__)

_PAGE_S = 5.0
_DISK_MIB = 1024
"""Enough for the logs of half an hour."""
_TRIES = 8
"""Of a front for each router, until all have been met by chance."""
_POOL_MIB: dict[Role, int] = {"prefill": 96, "decode": 22}
"""So few blocks that they are used again and again; and, where answers grow, that sequences lose
theirs and are handed back."""
_CHUNK_TOKENS = 128
"""As many as usual, of the longest prompt, take a busy machine as long as a hang does."""
_CONFIGURATION = """
# Every request is handed off while there is a prefill worker: by this policy local prefill is for
# the time without one.
local_prefill = "auto"
policy = "least_loaded"
deterministic = true
{more}

[advanced]
# An engine that hangs is left while it does; no step of so few tokens takes as long.
engine_hang_s = 3.0
""" + "".join(
    f"""
[[pools]]
name = "{role}"
role = "{role}"
count = {COUNT}
kv_pool_mib = {_POOL_MIB[role]}
chunk_tokens = {_CHUNK_TOKENS}
"""
    for role in ROLES
)


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker as the registry and the launcher know it now."""

    slot: str
    role: str
    pid: int
    record: WorkerRecord

    @property
    def port(self) -> int:
        """Of its gRPC server."""
        return port_of(self.record.address)


class Cluster:
    """Use it as a context."""

    routers = COUNT
    """How many routers there are."""
    # Ray's control store may die, and the store behind it.
    configured = f'gcs_store = "embedded"\nrouters = {COUNT}'
    """Lines of its configuration."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="chaos-")
        self.folder = Path(self._folder.name)
        """For files of the cluster; it is deleted in the end."""
        self.clock = _clock(self.folder)
        """That of all processes; None where it cannot be made to jump."""
        self._environment = {} if self.clock is None else self.clock.environment
        self.memory = _memory(self.folder.name)
        """The group of the launcher and of all that it starts; None where there can be none."""
        self.disk: SmallDisk | None = None
        """The small disk of the run directory and of ``data_dir``; None where there can be none."""
        self._context = contextlib.ExitStack()
        self.store = Store(os.environ | self._environment)
        self.wire = Proxy(self.store.port)
        """Between the processes and the store."""
        self._pages = httpx.AsyncClient(
            trust_env=False,
            timeout=_PAGE_S,
            # The kernel picks a router for each connection.
            limits=httpx.Limits(max_keepalive_connections=0),
        )
        self._up: UpProcess | None = None
        self._cluster_id = ""
        self._known: dict[str, int] = {}
        """Process ids by incarnation."""
        self._workers: dict[str, int] = {}
        """Process ids by slot, of each worker's present or last life."""
        self.fronts = Fronts("", "", "")
        self.left: list[str] = []
        """Workers and supervisors that had not ended when the cluster had: one line each."""

    @property
    def up(self) -> UpProcess:
        """The launcher."""
        assert self._up is not None, "not started"
        return self._up

    async def __aenter__(self) -> Self:
        self.disk = self._small_disk()
        await self.store.start()
        await self.wire.start()
        file = self.folder / "baton.toml"
        file.write_text(_CONFIGURATION.format(more=self.configured))
        variables = {
            "BATON_REDIS_URL": self.store.url(self.wire.port),
            "BATON_DATA_DIR": str((self.folder if self.disk is None else self.disk.path) / "data"),
        }
        try:
            await asyncio.to_thread(self._start, file, variables | self._environment)
            await self.workers()
        except BaseException as error:
            await self.__aexit__(type(error), error, None)
            raise
        return self

    def _small_disk(self) -> SmallDisk | None:
        """Mount a small disk, on which processes that are started from now on have their temporary
        folder."""
        try:
            disk = self._context.enter_context(small_disk(_DISK_MIB))
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("the disk will not be full: %s", error)
            return None
        variables = patch.dict(os.environ, {"TMPDIR": str(disk.path)})
        self._context.enter_context(variables)
        return disk

    def _start(self, file: Path, variables: Mapping[str, str]) -> None:
        """Start all but the store, and wait until it serves."""
        self._up = UpProcess("--config", str(file), env=variables)
        if self.memory is not None:
            self.memory.add(self._up.process.pid)
        state = self._up.wait_ready().state
        self._cluster_id = state.cluster_id
        self.fronts = Fronts(state.http, state.grpc, state.model)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # A fault that was not healed may have stopped some, and those would not end.
        self.go_on()
        await asyncio.to_thread(self._end)
        await self._pages.aclose()
        await self.wire.stop()
        await self.store.stop()
        if self.memory is not None:
            await asyncio.to_thread(self.memory.remove)
        self._context.close()
        self._folder.cleanup()

    def _end(self) -> None:
        """End all but the store, in order, and list what is left."""
        if self._up is not None:
            self._up.__exit__(None, None, None)
            self.left = self._actors()

    def _actors(self) -> list[str]:
        """The workers and supervisors that run: one line each."""
        return [
            f"process {process.pid}: {line}"
            for process, line in told_by(self._cluster_id, _named)
            if any(name in line for name in ACTORS)
        ]

    @property
    def key_prefix(self) -> str:
        """Of the cluster's keys in the store."""
        return f"baton:{{{self._cluster_id}}}:"

    def save_logs(self, folder: Path) -> None:
        """Copy the processes' logs to a folder."""
        shutil.copytree(self.up.logs, folder, dirs_exist_ok=True)

    def pids(self) -> dict[str, int]:
        """Of routers and workers, by name; of workers those that were there when last looked."""
        return self._routers() | self._workers

    def _routers(self) -> dict[str, int]:
        processes = self.up.state.processes
        return {name: pid for name, pid in processes.items() if name.startswith("router")}

    def processes(self) -> list[psutil.Process]:
        """All that belong to the cluster."""
        return processes_of(self._cluster_id) if self._cluster_id else []

    def stand_still(self) -> None:
        """SIGSTOP for every process: routers, workers, store, Ray's, supervisor and launcher."""
        stopped: set[psutil.Process] = set()
        # One that was just starting another is stopped before that one is seen.
        while fresh := self._host() - stopped:
            for process in fresh:
                with contextlib.suppress(psutil.Error):
                    process.suspend()
            stopped |= fresh

    def go_on(self) -> None:
        """SIGCONT for every process, whatever has stopped it."""
        for process in self._host():
            with contextlib.suppress(psutil.Error):
                process.resume()

    def _host(self) -> set[psutil.Process]:
        """Of the whole machine as the cluster's clients know it."""
        found = set(self.processes())
        own = () if self._up is None else (self._up.process.pid,)
        for pid in (*own, *self.store.pids):
            with contextlib.suppress(psutil.Error):
                found.add(psutil.Process(pid))
        return found

    async def workers(self) -> list[Worker]:
        """Those that are registered and whose process runs. Raises ``redis.RedisError``."""
        records = await Registry(self.store.client, self._cluster_id).all()
        found = []
        for record in sorted(records.values(), key=lambda record: record.slot):
            pid = self._pid_of(record)
            if pid is not None and is_alive(pid):
                self._workers[record.slot] = pid
                found.append(Worker(record.slot, record.role, pid, record))
        return found

    def _pid_of(self, record: WorkerRecord) -> int | None:
        """Who listens at the worker's address: the launcher may not know of a new life yet."""
        if record.incarnation not in self._known:
            port = port_of(record.address)
            for process in self.processes():
                if port in _listening(process):
                    self._known[record.incarnation] = process.pid
        return self._known.get(record.incarnation)

    async def is_healthy(self) -> bool:
        """Whether every router can use every worker, by their own words."""
        try:
            page = await self.page(self.fronts.http)
            return _all_routable(page) and await self._all_routers_ok()
        except httpx.HTTPError:
            return False

    async def _all_routers_ok(self) -> bool:
        answered: set[str] = set()
        for _ in range(_TRIES * self.routers):
            health = await self._pages.get(f"http://{self.fronts.http}/health")
            if health.json().get("status") != "ok":
                return False
            answered.add(health.headers[ROUTER_HEADER])
            if len(answered) == self.routers:
                return True
        return False

    async def health(self) -> str:
        """What one of the routers says of itself. Raises ``httpx.HTTPError``."""
        answer = await self._pages.get(f"http://{self.fronts.http}/health")
        return str(answer.json().get("status"))

    async def fail_over(self) -> None:
        """The store's replica takes its place."""
        await self.store.promote()
        self.wire.lead_to(self.store.port)

    async def page(self, address: str) -> str:
        """The /metrics page at an address. Raises ``httpx.HTTPError``."""
        return (await self._pages.get(f"http://{address}/metrics")).raise_for_status().text

    def signal(self, pid: int, number: signal.Signals) -> None:
        """Send a signal to a process of the cluster's, if it is still there."""
        if any(process.pid == pid for process in self.processes()):
            os.kill(pid, number)


def _all_routable(page: str) -> bool:
    return all(series(page, "baton_routable_workers", role=role) == COUNT for role in ROLES)


def _named(process: psutil.Process) -> tuple[psutil.Process, str]:
    return process, " ".join(process.cmdline())


def _clock(folder: Path) -> Clock | None:
    try:
        return Clock(folder)
    except NoClock as error:
        log.warning("the clock will not jump: %s", error)
        return None


def _memory(name: str) -> MemoryGroup | None:
    try:
        return MemoryGroup(name)
    except NoMemoryGroup as error:
        log.warning("the memory will not be full: %s", error)
        return None


def port_of(address: str) -> int:
    """Of host:port."""
    return int(address.rpartition(":")[2])


def _listening(process: psutil.Process) -> set[int]:
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:
        return set()
    return {one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN}


def is_alive(pid: int) -> bool:
    """Whether a process runs, or could if it were not stopped."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def series(page: str, name: str, **labels: str) -> float:
    """The sum of a page's samples of that name that have these labels."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
