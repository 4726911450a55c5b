"""How much memory this process may still take on its host."""

from __future__ import annotations

import sys
from pathlib import Path


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """The lesser of what the kernel calls available and what the container's limit leaves.

    See proc(5), MemAvailable, and the kernel's cgroup-v2.rst, ``memory.max``. Where neither can be
    read there is no bound that is known: ``sys.maxsize``.
    """
    return min(_of_machine(meminfo), _of_container(cgroup))


def _of_machine(meminfo: Path) -> int:
    kib = _fields(meminfo).get("MemAvailable:")
    return sys.maxsize if kib is None else kib << 10


def _of_container(cgroup: Path) -> int:
    try:
        limit = int((cgroup / "memory.max").read_text())
    except (OSError, ValueError):
        return sys.maxsize
    stat = _fields(cgroup / "memory.stat")
    # Cached files go when memory is wanted.
    return max(0, limit - stat.get("anon", 0) - stat.get("shmem", 0))


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line by its first word."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
