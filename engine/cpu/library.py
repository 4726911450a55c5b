"""The CPU engine's C++, built for this machine at first use and kept in the cache.

Without a C++ compiler there is no library, and torch computes.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

from baton import cpp_library
from baton.errors import ConfigError

log = logging.getLogger(__name__)

_FOLDER = Path(__file__).parent
_TARGET = cpp_library.NATIVE


@lru_cache(maxsize=1)
def cpu_library() -> ctypes.CDLL | None:
    """The library, or None where torch is to compute; the reason is logged once."""
    try:
        return cpp_library.load_library(_FOLDER, _TARGET)
    except ConfigError as error:
        log.warning("torch computes, several times slower: %s", error)
        return None


def library_build() -> str:
    """What names the library: its sources, compiler and CPU. Two builds may differ in last bits."""
    library = cpu_library()
    return "" if library is None else Path(library._name).stem


def build_library(compiler: str, target: str) -> Path:
    """See ``baton.cpp_library.build_library``."""
    return cpp_library.build_library(_FOLDER, compiler, target)
