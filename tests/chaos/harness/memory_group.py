"""A cgroup for a cluster: its memory can be filled, and that of the machine is not."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_GONE_S = 10.0
_POLL_S = 0.05


class NoMemoryGroup(Exception):
    """This machine does not let one be made; the message says why."""


@dataclass(frozen=True, slots=True)
class _Files:
    """Names of one version of cgroups: where groups are made, and what is read and written."""

    root: Path
    used: str
    limit: str
    no_limit: str


_VERSIONS = (
    _Files(_CGROUPS / "memory", "memory.usage_in_bytes", "memory.limit_in_bytes", "-1"),
    _Files(_CGROUPS, "memory.current", "memory.max", "max"),
)


class MemoryGroup:
    """A new group without a limit. Processes that its members start belong to it, too."""

    def __init__(self, name: str) -> None:
        """Make the group ``name``. Raises NoMemoryGroup."""
        why = "no cgroup of memory can be made"
        for files in _VERSIONS:
            self._files, self._folder = files, files.root / name
            try:
                self._folder.mkdir()
            except OSError as error:
                why = str(error)
                continue
            try:
                self.limit(None)
            except OSError as error:
                why = str(error)
                self._folder.rmdir()
            else:
                return
        raise NoMemoryGroup(why)

    def add(self, pid: int) -> None:
        """Move a process into the group. Memory that it has already stays counted elsewhere. Raises
        OSError."""
        (self._folder / "cgroup.procs").write_text(str(pid))

    def used_bytes(self) -> int:
        """Return the memory in use, cached files included. Raises OSError."""
        return int((self._folder / self._files.used).read_text())

    def limit(self, size: int | None) -> None:
        """Set the group's memory in bytes; None takes the limit away. Raises OSError."""
        text = self._files.no_limit if size is None else str(size)
        (self._folder / self._files.limit).write_text(text)

    def remove(self) -> None:
        """Remove the group; its processes have ended, or end now."""
        until = time.monotonic() + _GONE_S
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                self._folder.rmdir()
                return
            time.sleep(_POLL_S)
