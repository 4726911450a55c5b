"""Memory of the host: how much this process may still use, and allocation of large pieces."""

from __future__ import annotations

import contextlib
import mmap
import sys
from pathlib import Path

from baton.errors import ConfigError

_LARGE_PAGE = 2 << 20
_POPULATE_WRITE, _COLLAPSE = 23, 25
"""Linux 5.14 and 6.1 advice that Python's mmap has no names for; see madvise(2)."""


def take_memory(size: int, field: str = "kv_pool_mib") -> mmap.mmap:
    """Allocate ``size`` bytes of zeros for KV blocks. ``field`` of the configuration sets the
    amount.

    Large pages are used if the kernel gives them. Attention jumps from block to block, and with
    small pages each jump would cost a search of the page table. All pages are touched at once,
    since otherwise a step that first writes a page waits until the kernel has cleared it. Raises
    ConfigError if the machine has too little memory.
    """
    check_available(size, field)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise too_much(size, error, field) from error
    populate(memory, 0, size)
    return memory


def check_available(size: int, field: str = "kv_pool_mib") -> None:
    """Check that the machine has ``size`` bytes left. Raises ConfigError if it has not.

    The kernel would grant the memory now, and kill a process when the pages are touched.
    """
    available = available_bytes()
    if size > available:
        raise ConfigError(
            f"{size >> 20} MiB for KV blocks exceed the {available >> 20} MiB that this machine "
            f"has left; lower {field}"
        )


def too_much(size: int, error: OSError, field: str = "kv_pool_mib") -> ConfigError:
    """Return the error for an allocation that the kernel refused."""
    return ConfigError(f"cannot allocate {size >> 20} MiB for KV blocks ({error}); lower {field}")


def populate(memory: mmap.mmap, start: int, size: int) -> None:
    """Touch all pages of an unwritten range, in large pages where the kernel gives them.

    Most systems give shared memory small pages, but merge existing pages into a large one on
    request. So each large page's range first gets one small page. Filling the range with small
    pages that the kernel copies would take about forty times as long.
    """
    _advise(memory, getattr(mmap, "MADV_HUGEPAGE", None), start, size)
    for large in range(start, start + size, _LARGE_PAGE):
        _advise(memory, _POPULATE_WRITE, large, min(mmap.PAGESIZE, start + size - large))
    _advise(memory, _COLLAPSE, start, size)
    # This touches what is left: the rest of the last large page, or all pages if there are no large
    # ones.
    _advise(memory, _POPULATE_WRITE, start, size)


def _advise(memory: mmap.mmap, advice: int | None, start: int, size: int) -> None:
    # Older kernels refuse unknown advice.
    with contextlib.suppress(OSError):
        if advice is not None:
            memory.madvise(advice, start, size)


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the smaller of the kernel's available memory and the rest of the container's limit.

    See proc(5), MemAvailable, and the kernel's cgroup-v2.rst, ``memory.max``. Where neither can be
    read, no bound is known and the result is ``sys.maxsize``.
    """
    return min(_of_machine(meminfo), _of_container(cgroup))


def resident_bytes(statm: Path = Path("/proc/self/statm")) -> int:
    """Return the memory that this process uses: its resident set, in bytes."""
    return int(statm.read_text().split()[1]) * mmap.PAGESIZE


def limit_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the memory limit in bytes: the machine's memory, or its container's limit.

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
    # The kernel frees cached files when it needs memory.
    return max(0, limit - stat.get("anon", 0) - stat.get("shmem", 0))


def _fields(path: Path) -> dict[str, int]:
    """Return the first number of each line of a file, by the line's first word."""
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
