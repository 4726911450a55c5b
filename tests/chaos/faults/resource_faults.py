"""Descriptors, memory and disk that run out, and clients that hardly read."""

from __future__ import annotations

import asyncio
import contextlib
import json
import resource
import socket

import psutil

from baton.host.background import end_tasks
from tests.chaos.faults.fault import CannotStrike, Fault
from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.victim import Victim

_SPARE_DESCRIPTORS = 1
_SLOW_CLIENTS = 4
_SLOW_TOKENS = 400
_RECEIVE_BUFFER_BYTES = 2048
_READ_EVERY_S = 1.0


class _Limited(Fault):
    """A limit of running processes is lowered (prlimit(2)); healing gives them back the old one."""

    what: int

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self._before: dict[int, tuple[int, int]] = {}

    def _pids(self) -> list[int]:
        return [self.victim.pid]

    def _limit(self, pid: int) -> int:
        raise NotImplementedError

    async def prepare(self) -> None:
        for pid in self._pids():
            with contextlib.suppress(ProcessLookupError):
                try:
                    self._before[pid] = resource.prlimit(pid, self.what)
                    resource.prlimit(pid, self.what, self._before[pid])
                except PermissionError as error:
                    raise CannotStrike(f"limits of processes cannot be set: {error}") from error

    async def strike(self) -> None:
        for pid, (_, hard) in self._before.items():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                resource.prlimit(pid, self.what, (self._limit(pid), hard))

    async def heal(self) -> None:
        for pid, before in self._before.items():
            with contextlib.suppress(ProcessLookupError):
                resource.prlimit(pid, self.what, before)


class NoDescriptors(_Limited):
    """It can open no file, and accept no connection."""

    what = resource.RLIMIT_NOFILE

    def _limit(self, pid: int) -> int:
        return psutil.Process(pid).num_fds() + _SPARE_DESCRIPTORS


class NoMemory(_Limited):
    """It gets no more memory of the kernel."""

    what = resource.RLIMIT_AS

    def _limit(self, pid: int) -> int:
        # Less than it has: what it has stays, and no more is given.
        return int(psutil.Process(pid).memory_info().vms) // 2


class DiskFull(_Limited):
    """No worker and no router can make a file longer, its log included."""

    what = resource.RLIMIT_FSIZE

    def _pids(self) -> list[int]:
        return list(self.cluster.pids().values())

    def _limit(self, pid: int) -> int:
        return 0


class SlowClients(Fault):
    """Some ask for long answers over HTTP, and read a byte a second."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self._tasks: list[asyncio.Task[None]] = []

    async def strike(self) -> None:
        self._tasks = [asyncio.create_task(self._read_slowly()) for _ in range(_SLOW_CLIENTS)]

    async def heal(self) -> None:
        """They hang up."""
        await end_tasks(self._tasks)

    async def _read_slowly(self) -> None:
        loop = asyncio.get_running_loop()
        host, port = self.cluster.fronts.http.rsplit(":", 1)
        with socket.socket() as client:
            client.setblocking(False)
            # So little that the answer soon waits in the router.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            await loop.sock_connect(client, (host, int(port)))
            await loop.sock_sendall(client, self._request())
            while await loop.sock_recv(client, 1):
                await asyncio.sleep(_READ_EVERY_S)

    def _request(self) -> bytes:
        body = json.dumps(
            {
                "model": self.cluster.fronts.model,
                "prompt": "Once",
                "max_tokens": _SLOW_TOKENS,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        ).encode()
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: chaos\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body
