"""Memory of the host: how much this process may still take, and taking a large piece of it."""

from __future__ import annotations

import contextlib
import mmap
import sys
from pathlib import Path

from baton.errors import ConfigError

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and later; Python's mmap has no name for it."""


def take_memory(size: int, descriptor: int | None = None) -> mmap.mmap:
    """``size`` bytes of zeros, private ones or, shared, those of a file: a KV cache's pool.

    In large pages, where the kernel gives them: attention jumps from block to block, and with small
    pages each jump would cost a search of the page table. Taken at once: a step that is the first
    to write a page would wait until the kernel has cleared it. Raises ConfigError where the machine
    has less.
    """
    available = available_bytes()
    if size > available:
        # The kernel would grant it now and kill a process when the pages are touched.
        raise ConfigError(
            f"{size >> 20} MiB for KV blocks are more than the {available >> 20} MiB that this "
            "machine has left; lower kv_pool_mib"
        )
    try:
        if descriptor is None:
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        else:
            memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED)
    except OSError as error:
        raise ConfigError(
            f"{size >> 20} MiB for KV blocks cannot be had ({error}); lower kv_pool_mib"
        ) from error
    for wish in (getattr(mmap, "MADV_HUGEPAGE", None), _MADV_POPULATE_WRITE):
        # A kernel that does not know it refuses.
        with contextlib.suppress(OSError):
            if wish is not None:
                memory.madvise(wish)
    return memory


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
