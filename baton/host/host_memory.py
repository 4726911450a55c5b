"""Memory of the host: how much this process may still take, and taking a large piece of it."""

from __future__ import annotations

import contextlib
import mmap
import sys
from pathlib import Path

from baton.errors import ConfigError

_LARGE_PAGE = 2 << 20
_POPULATE_WRITE, _COLLAPSE = 23, 25
"""Advice of Linux 5.14 and 6.1 for which Python's mmap has no names; see madvise(2)."""


def take_memory(size: int, field: str = "kv_pool_mib") -> mmap.mmap:
    """``size`` bytes of zeros for KV blocks, as many as the config's ``field`` says.

    In large pages, where the kernel gives them: attention jumps from block to block, and with small
    pages each jump would cost a search of the page table. Taken at once: a step that is the first
    to write a page would wait until the kernel has cleared it. Raises ConfigError where the machine
    has less.
    """
    check_available(size, field)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise too_much(size, error, field) from error
    populate(memory, 0, size)
    return memory


def check_available(size: int, field: str = "kv_pool_mib") -> None:
    """Raises ConfigError where the machine has less.

    The kernel would grant it now, and kill a process when the pages are touched.
    """
    available = available_bytes()
    if size > available:
        raise ConfigError(
            f"{size >> 20} MiB for KV blocks are more than the {available >> 20} MiB that this "
            f"machine has left; lower {field}"
        )


def too_much(size: int, error: OSError, field: str = "kv_pool_mib") -> ConfigError:
    """What the operator is told of the kernel's refusal."""
    return ConfigError(f"{size >> 20} MiB for KV blocks cannot be had ({error}); lower {field}")


def populate(memory: mmap.mmap, start: int, size: int) -> None:
    """Take all pages of a part that nobody has written, large ones where the kernel gives them.

    Most systems give memory that is shared small pages, but make a large one of those that are
    there when they are asked to. So each large page's room gets one small page first: to fill it
    with small ones, and have the kernel copy them, would take some forty times as long.
    """
    _advise(memory, getattr(mmap, "MADV_HUGEPAGE", None), start, size)
    for large in range(start, start + size, _LARGE_PAGE):
        _advise(memory, _POPULATE_WRITE, large, min(mmap.PAGESIZE, start + size - large))
    _advise(memory, _COLLAPSE, start, size)
    # What is still missing: the rest of the last large page, or all, where there are none.
    _advise(memory, _POPULATE_WRITE, start, size)


def _advise(memory: mmap.mmap, advice: int | None, start: int, size: int) -> None:
    # A kernel that does not know it refuses.
    with contextlib.suppress(OSError):
        if advice is not None:
            memory.madvise(advice, start, size)


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """The lesser of what the kernel calls available and what the container's limit leaves.

    See proc(5), MemAvailable, and the kernel's cgroup-v2.rst, ``memory.max``. Where neither can be
    read there is no bound that is known: ``sys.maxsize``.
    """
    return min(_of_machine(meminfo), _of_container(cgroup))


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Memory that this process has in use: its resident set."""
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE


def limit_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Memory that this process may have at most: the machine's, or its container's limit.

    0 where neither can be read.
    """
    limits = [_fields(meminfo).get("MemTotal:", 0) << 10]
    with contextlib.suppress(OSError, ValueError):
        limits.append(int((cgroup / "memory.max").read_text()))
    return min((limit for limit in limits if limit), default=0)


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
