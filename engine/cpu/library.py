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
    """Return the compiled C++ library; None if it cannot be built, so that torch has to compute.
    The reason is logged once."""
    try:
        return CppLibrary(SOURCES, _TARGET).load()
    except ConfigError as error:
        log.warning("using torch, which is several times slower: %s", error)
        return None


def library_build() -> str:
    """Name of the library's build, which depends on its sources, compiler and CPU; empty without a
    library. Two builds may differ in the last bits of their results."""
    library = cpu_library()
    return "" if library is None else Path(library._name).stem


@dataclass(frozen=True, slots=True)
class CoreShare:
    """What an engine needs in order to share its host's cores with other engines; board.h explains
    the fields."""

    lines: int
    """Address of the shared memory in which all engines of the host record their load. It stays
    mapped as long as the decoder runs."""
    count: int
    mine: int
    cores: int
    yields: bool
    """Whether this engine's helper threads leave their cores when other engines are more urgent
    (prefill does)."""
