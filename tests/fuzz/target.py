"""What a fuzzer calls with bytes of its own making."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
