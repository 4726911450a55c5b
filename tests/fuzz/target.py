"""What a fuzzer calls with bytes of its own making, and what one call may cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

_RESET_PEAK = "5"


@dataclass(frozen=True, slots=True)
class Target:
    """One entrance for what strangers made."""

    name: str
    rooms: tuple[str, ...]
    """Modules and packages whose branches guide the fuzzer."""
    prepare: Callable[[], Callable[[bytes], None]]
    """Makes what is called; it raises for what is a fault of Baton's alone."""
    seeds: Callable[[], Sequence[bytes]]
    """Small inputs from which the fuzzer begins."""
    max_bytes: int = 4096
    max_cpu_s: float = 2.0
    """CPU time that an input may cost this process, in seconds, with the fuzzer's instruments."""
    max_memory_mib: int = 256
    """Memory that an input may add to this process."""


def judged(target: Target) -> Callable[[bytes], None]:
    """Prepare a target. The call raises AssertionError for an input that costs too much, too.

    The first seed is tried without a judge: it loads modules.
    """
    one = target.prepare()
    one(target.seeds()[0])

    def judge(data: bytes) -> None:
        Path("/proc/self/clear_refs").write_text(_RESET_PEAK)
        before, cpu = _peak_mib(), time.process_time()
        one(data)
        cpu, grown = time.process_time() - cpu, _peak_mib() - before
        assert cpu <= target.max_cpu_s, f"{cpu:.1f} s of CPU time"
        assert grown <= target.max_memory_mib, f"{grown} MiB"

    return judge


def _peak_mib() -> int:
    """Return the maximum resident memory since the last reset, in MiB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) >> 10
    raise AssertionError("/proc/self/status has no VmHWM")
