"""Identify a process, whatever the wall clock shows: by its pid, start ticks and boot id.

The kernel counts the ticks at which a process starts from its own boot, so that no step of the wall
clock moves them. The time since the epoch, which psutil computes from them, moves with each step.
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
"""Places in /proc/<pid>/stat of fields 3 and 22, counted from behind the name."""
_ENDED = ("Z", "X")
"""States of a process that has ended: a zombie only waits for its parent."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One incarnation of a process. It travels as JSON."""

    pid: int
    start_ticks: int
    """Clock ticks from the boot to its start: its pid may belong to another process by now."""
    space: str
    """Where that pid means this process; see ``pid_space``."""

    @classmethod
    def own(cls) -> ProcessIdentity:
        """The identity of this process. Raises OSError where /proc cannot be read."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> ProcessIdentity:
        """The identity of the process with this pid. Raises OSError where there is none."""
        _, ticks = _look(pid)
        return cls(pid, ticks, pid_space())

    @property
    def age_s(self) -> float:
        """Seconds since its start; for a process that can be seen from here."""
        started_s = self.start_ticks / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s

    @property
    def is_near(self) -> bool:
        """Whether it can be seen from here."""
        return self.space == pid_space()

    @property
    def is_running(self) -> bool:
        """Whether it is seen to run; False where it cannot be seen from here."""
        return self._is_seen_to(run=True)

    @property
    def is_gone(self) -> bool:
        """Whether it is known to have ended; False where it cannot be seen from here."""
        return self._is_seen_to(run=False)

    def _is_seen_to(self, *, run: bool) -> bool:
        if not self.is_near:
            return False
        try:
            state, ticks = _look(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return not run
        except OSError:
            return False  # where no file can be opened, nothing is seen
        return run is (ticks == self.start_ticks and state not in _ENDED)

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it runs here. Raises OSError."""
        if self.is_running:
            os.kill(self.pid, number)


@cache
def pid_space() -> str:
    """Name of the boot and of the pid namespace within which a pid means one process."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return platform.node()


def _look(pid: int) -> tuple[str, int]:
    """State and start ticks. Raises OSError for a process that is not there."""
    # The name is in parentheses, and may contain anything.
    fields = (_PROC / str(pid) / "stat").read_bytes().rpartition(b") ")[2].decode().split()
    return fields[_STATE], int(fields[_START_TICKS])


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """A process and its node: enough to end it from anywhere. It travels as JSON."""

    process: ProcessIdentity
    node: str
    """Ray's id of the node."""

    @classmethod
    def own(cls, node: str) -> Whereabouts:
        """This process, which runs on ``node``."""
        return cls(ProcessIdentity.own(), node)
