"""Which process something of a cluster is, for whoever may have to end it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from deploy.launcher_life import pid_space


@dataclass(frozen=True, slots=True)
class Whereabouts:
    """Of one process; it travels as JSON."""

    pid: int
    started: float
    """In Unix seconds: a process id alone may be another's by now."""
    pid_space: str
    """Where that process id means this process; see ``deploy.launcher_life``."""
    node: str
    """Ray's id of its node."""

    @classmethod
    def own(cls, node: str) -> Whereabouts:
        """Of this process, which runs on ``node``."""
        return cls(os.getpid(), psutil.Process().create_time(), pid_space(), node)

    @property
    def is_near(self) -> bool:
        """Whether its process id means it here, too."""
        return self.pid_space == pid_space()
