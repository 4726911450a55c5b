"""A worker that the network has left: alone, deaf, mute, or with every fifth packet lost."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import psutil

from baton.host.background import end_tasks
from tests.chaos.faults.fault import CannotStrike, Fault
from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.packet_filter import Program, attach, detach, losing, take_socket
from tests.chaos.harness.victim import Victim

_AGAIN_S = 0.05
"""So often is looked for sockets that are new."""
_LOST_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class _End:
    """One end of a TCP connection, or a listening socket."""

    pid: int
    descriptor: int
    here: int
    """Its own port."""
    there: int
    """The other end's port; 0 where it listens."""


class _Partition(Fault):
    """Drops packets between the victim and others: Ray's own connections are left alone."""

    into = True
    """Whether what is sent to the victim is lost."""
    out = True
    """Whether what the victim sends is lost."""
    share = 1.0
    """Of the packets."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self._taken: dict[_End, socket.socket] = {}
        self._program: Program = losing(self.share)
        self._ports: frozenset[int] = frozenset()
        self._again: asyncio.Task[None] | None = None

    async def prepare(self) -> None:
        self._ports = await self._ports_of_others()
        self._take()
        if not self._taken:
            raise CannotStrike("no socket of the victim could be reached")

    async def strike(self) -> None:
        for taken in self._taken.values():
            attach(taken, self._program)
        self._again = asyncio.create_task(self._cut_again())

    async def drop(self) -> None:
        for taken in self._taken.values():
            taken.close()

    async def heal(self) -> None:
        if self._again is not None:
            await end_tasks([self._again])
        for taken in self._taken.values():
            with taken, contextlib.suppress(OSError):
                detach(taken)

    async def _ports_of_others(self) -> frozenset[int]:
        """The ports that the victim may connect to."""
        workers = await self.cluster.workers()
        return frozenset([*(worker.port for worker in workers), self.cluster.wire.port])

    def _own_port(self) -> int:
        assert self.victim.worker is not None, "a worker is cut off"
        return self.victim.worker.port

    async def _cut_again(self) -> None:
        while True:
            for taken in self._take():
                attach(taken, self._program)
            await asyncio.sleep(_AGAIN_S)

    def _take(self) -> list[socket.socket]:
        """Get hold of the sockets that are new, and return them."""
        fresh = []
        for end in self._ends():
            if end not in self._taken:
                try:
                    taken = take_socket(end.pid, end.descriptor)
                except PermissionError as error:
                    raise CannotStrike(f"a socket cannot be taken: {error}") from error
                except OSError:
                    # Closed since it was seen, or its process has ended.
                    continue
                self._taken[end] = taken
                fresh.append(taken)
        return fresh

    def _ends(self) -> list[_End]:
        mine = [end for end in _tcp_ends(self.victim.pid) if self._is_meant(end)]
        ends = list(mine) if self.into else []
        if self.out:
            mirrored = {(end.there, end.here) for end in mine if end.there}
            others = [*self.cluster.pids().values(), os.getpid()]
            ends += [
                end
                for pid in others
                if pid != self.victim.pid
                for end in _tcp_ends(pid)
                if (end.here, end.there) in mirrored
            ]
        return ends

    def _is_meant(self, end: _End) -> bool:
        return end.here == self._own_port() or end.there in self._ports


class CutOff(_Partition):
    """Nothing comes through, either way."""


class Deaf(_Partition):
    """What others send does not arrive; what it sends does."""

    out = False


class Mute(_Partition):
    """What it sends does not arrive; what others send does."""

    into = False


class Lossy(_Partition):
    """Some packets are lost, either way."""

    share = _LOST_SHARE


class WithoutStore(_Partition):
    """It alone is cut off from the store."""

    async def _ports_of_others(self) -> frozenset[int]:
        return frozenset([self.cluster.wire.port])

    def _own_port(self) -> int:
        return -1


def _tcp_ends(pid: int) -> Iterator[_End]:
    try:
        connections: list[Any] = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:
        return
    for one in connections:
        if one.status in (psutil.CONN_ESTABLISHED, psutil.CONN_LISTEN, psutil.CONN_SYN_SENT):
            yield _End(pid, one.fd, one.laddr.port, one.raddr.port if one.raddr else 0)
