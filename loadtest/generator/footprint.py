"""What a cluster holds, and what of it grows or stays that should not. The rules are pure.

Two things show a leak: what is still held when nothing is under way any more, and memory or
descriptors that go on growing under a load that stays the same.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import psutil

MORE_DESCRIPTORS = 16
"""Connections come and go: so many more than at first are no leak."""
MORE_KEYS = 16
"""Some kinds of keys are there from the first request on; what leaks does so with every request."""
MORE_BYTES = 64 << 20
"""Growth of a process's memory that is no leak: an allocator keeps some of what it was given."""
MORE_SHARE = 0.1
"""The same as a share of what it had."""
_FEWEST_SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Footprint:
    """At one moment."""

    at_s: float
    """Seconds since the run's beginning."""
    resident_bytes: Mapping[str, int] = field(default_factory=dict)
    """By the process's name."""
    descriptors: Mapping[str, int] = field(default_factory=dict)
    """By the process's name."""
    held: Mapping[str, float] = field(default_factory=dict)
    """What the metrics say that is held for requests: all 0 when nothing is under way."""
    keys: Mapping[str, int] = field(default_factory=dict)
    """Keys in the store, by kind."""


def measure_processes(pids: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Resident bytes and descriptors by name; without those that have ended."""
    resident, descriptors = {}, {}
    for name, pid in pids.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            resident[name] = int(process.memory_info().rss)
            descriptors[name] = process.num_fds()
    return resident, descriptors


def still_held(first: Footprint, last: Footprint) -> list[str]:
    """What a quiet cluster holds, a line each; ``first`` is of before the load."""
    lines = [f"{count:.0f} {what} are held" for what, count in last.held.items() if count]
    lines += [
        f"the store has {count} keys {kind}, at first {first.keys.get(kind, 0)}"
        for kind, count in last.keys.items()
        if count > first.keys.get(kind, 0) + MORE_KEYS
    ]
    lines += [
        f"{name} has {count} descriptors, at first {first.descriptors[name]}"
        for name, count in last.descriptors.items()
        if count > first.descriptors.get(name, count) + MORE_DESCRIPTORS
    ]
    return lines


def growing(samples: Sequence[Footprint]) -> list[str]:
    """Whose memory went on growing in the second half of a load, a line each.

    In the first half caches and pools fill. Medians of quarters are compared: a single sample says
    little.
    """
    if len(samples) < _FEWEST_SAMPLES:
        return []
    quarter = len(samples) // 4
    third, fourth = samples[-2 * quarter : -quarter], samples[-quarter:]
    lines = []
    for name in samples[-1].resident_bytes:
        before, after = (_median(part, name) for part in (third, fourth))
        bound = max(MORE_BYTES, MORE_SHARE * before)
        if before and after > before + bound:
            lines.append(
                f"{name} went on growing: {before / (1 << 20):.0f} MiB in the third quarter,"
                f" {after / (1 << 20):.0f} MiB in the last"
            )
    return lines


def verdict(leaks: Sequence[str], looks: int) -> list[str]:
    """What is said of ``leaks``, seen in so many ``looks`` under load; a line each."""
    lines = [f"leak: {leak}" for leak in leaks]
    if looks < _FEWEST_SAMPLES:
        lines.append(
            f"{looks} looks under load are too few to tell what grows, {_FEWEST_SAMPLES} are not:"
            " longer --seconds or a shorter --every tells"
        )
    elif not leaks:
        lines.append(f"No leak was seen in {looks} looks.")
    return lines


def _median(part: Sequence[Footprint], name: str) -> float:
    values = [one.resident_bytes[name] for one in part if name in one.resident_bytes]
    return statistics.median_low(values) if values else 0.0
