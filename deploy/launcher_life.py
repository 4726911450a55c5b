"""Which process the launcher is, for those that are to end with it."""

from __future__ import annotations

import os
import platform
from functools import cache
from pathlib import Path

import psutil
from pydantic import BaseModel, ConfigDict

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")


class LauncherLife(BaseModel):
    """One life of a launcher."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: float
    """In Unix seconds: a process id alone may be another's by now."""
    pid_space: str
    """Where that process id means this process; see ``pid_space``."""

    @classmethod
    def own(cls) -> LauncherLife:
        """That of this process."""
        started = psutil.Process().create_time()
        return cls(pid=os.getpid(), started=started, pid_space=pid_space())

    @property
    def is_near(self) -> bool:
        """Whether its process can be seen from here."""
        return self.pid_space == pid_space()

    @property
    def is_gone(self) -> bool:
        """Whether it is known to be: of one on another machine nothing can be seen."""
        return self.is_near and not is_alive(self.pid, self.started)


@cache
def pid_space() -> str:
    """Names the machine, and on Linux the container, within which process ids mean the same."""
    try:
        boot = _BOOT_ID.read_text().strip()
        return f"{boot}/{_PID_NAMESPACE.readlink()}"
    except OSError:
        return platform.node()


def is_alive(pid: int, started: float) -> bool:
    """Whether the process of that id that began then, in Unix seconds, lives."""
    try:
        return psutil.Process(pid).create_time() == started
    except psutil.Error:
        return False
