"""The CPU engine's C++, built for this machine at first use and kept in the cache.

Without a C++ compiler there is no library, and torch computes.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from baton.errors import ConfigError
from baton.host.cpp_library import NATIVE, CppLibrary

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent
_TARGET = NATIVE


@lru_cache(maxsize=1)
def cpu_library() -> ctypes.CDLL | None:
    """The library; None if torch has to compute, and the reason is logged once."""
    try:
        return CppLibrary(SOURCES, _TARGET).load()
    except ConfigError as error:
        log.warning("using torch, which is several times slower: %s", error)
        return None


def library_build() -> str:
    """The build's name: its sources, compiler and CPU. Two builds may differ in the last bits."""
    library = cpu_library()
    return "" if library is None else Path(library._name).stem


@dataclass(frozen=True, slots=True)
class CoreShare:
    """How an engine shares its host's cores with others: see board.h."""

    lines: int
    """Address of the board; it stays mapped as long as the decoder runs."""
    count: int
    mine: int
    cores: int
    yields: bool
    """Whether this engine's helpers leave when others are more urgent."""
