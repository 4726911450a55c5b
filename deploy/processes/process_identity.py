"""Identifies a process by its pid, start ticks and boot id, independently of the wall clock.

The kernel counts the ticks until a process starts from its own boot, so steps of the wall clock do
not change them. The time since the epoch, which psutil computes from them, changes with each step.
"""

from __future__ import annotations

import os
import platform
import signal
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_PROC = Path("/proc")
_STATE, _START_TICKS = 0, 19
"""Indexes of the state and the start time in /proc/<pid>/stat, counted after the process's name.
They are fields 3 and 22 of the file."""
_ENDED = ("Z", "X")
"""States of a process that has ended: a zombie only waits for its parent."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One incarnation of a process, serialized as JSON."""

    pid: int
    start_ticks: int
    """Clock ticks from the boot to the start of the process. They distinguish it from a later
    process with the same pid."""
    space: str
    """The boot and the pid namespace in which ``pid`` is unique, as ``pid_space`` returns them."""

    @classmethod
    def own(cls) -> ProcessIdentity:
        """Return the identity of this process. Raises OSError if /proc cannot be read."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """Return the identity of the process with this pid. Raises OSError if there is none."""
        _, ticks = _look(pid)
        return cls(pid, ticks, pid_space())

    @property
    def age_s(self) -> float:
        """Return the seconds since the start of the process, which must be in the pid namespace of
        the caller."""
        started_s = self.start_ticks / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s

    @property
    def is_near(self) -> bool:
        """Whether the process is in the pid namespace of the caller, so that its state can be
        read."""
        return self.space == pid_space()

    @property
    def is_running(self) -> bool:
        """Whether the process is known to run; False if it is in another pid namespace."""
        return self._is_seen_to(run=True)

    @property
    def is_gone(self) -> bool:
        """Whether the process is known to have ended; False if it is in another pid namespace."""
        return self._is_seen_to(run=False)

    def _is_seen_to(self, *, run: bool) -> bool:
        if not self.is_near:
            return False
        try:
            state, ticks = _look(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return not run
        except OSError:
            return False  # no file can be opened, so nothing is known
        return run is (ticks == self.start_ticks and state not in _ENDED)

    def send(self, number: signal.Signals) -> None:
        """Send the signal ``number`` to the process, if it runs in this pid namespace. Raises
        OSError."""
        if self.is_running:
            os.kill(self.pid, number)


@cache
def pid_space() -> str:
    """Return the name of the boot and pid namespace within which a pid is unique."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def _look(pid: int) -> tuple[str, int]:
    """Return the state of a process, and the clock ticks from the boot to its start. Raises OSError
    if the process does not exist."""
    # The name is in parentheses, and may contain any character.
    fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b") ")[2].decode().split()
    return fields[_STATE], int(fields[_START_TICKS])


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """The identity of a process and of its node, with which any machine can end the process.
    Serialized as JSON."""

    process: ProcessIdentity
    node: str
    """Ray's id of the node on which the process runs."""

    @classmethod
    def own(cls, node: str) -> Whereabouts:
        """Return the identity of this process, together with its node: Ray's id ``node``."""
        return cls(ProcessIdentity.own(), node)
