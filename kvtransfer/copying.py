"""Checksums of bytes of this host, and copies that give the checksum of what they wrote.

``kvtransfer.checksum`` says what a checksum is; here it is computed at the speed of the memory, in
C++ (``native/copy.cpp``). Without a C++ compiler numpy computes, several times slower.
"""

from __future__ import annotations

import ctypes
import logging
from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from baton import cpp_library
from baton.errors import ConfigError
from kvtransfer import checksum as reference

log = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""Contiguous bytes, of any shape and item size."""
_FOLDER = Path(__file__).parent / "native"
_TARGET = cpp_library.NATIVE


@lru_cache(maxsize=1)
def copy_library() -> ctypes.CDLL | None:
    """The library, or None where numpy is to compute; the reason is logged once.

    The first call may build it, which takes seconds.
    """
    try:
        library = cpp_library.load_library(_FOLDER, _TARGET)
    except ConfigError as error:
        log.warning("numpy copies KV blocks, several times slower: %s", error)
        return None
    address, size = ctypes.c_void_p, ctypes.c_int64
    library.kv_checksum.argtypes = [address, size]
    library.kv_checksum.restype = ctypes.c_uint64
    library.kv_copy.argtypes = [address, address, size, ctypes.c_int]
    library.kv_copy.restype = ctypes.c_uint64
    return library


def checksum(data: Bytes) -> int:
    """``kvtransfer.checksum.checksum`` of up to 16 GiB. Releases the GIL."""
    source, library = _bytes_of(data), copy_library()
    if library is None:
        return reference.checksum(source.data)
    return int(library.kv_checksum(_address(source), source.size))


def copy(to: Bytes, source: Bytes, *, soon_read: bool = False) -> int:
    """Copy up to 16 GiB; the two do not overlap. Returns the checksum of what was written.

    ``source`` is read once, so that the checksum is that of the copy even while others write to it.
    ``soon_read``: the copy stays in the CPU's caches; otherwise it goes past them. Releases the
    GIL. Raises ValueError where the two differ in length, or ``to`` is read-only.
    """
    target, origin, library = _bytes_of(to), _bytes_of(source), copy_library()
    if target.size != origin.size or not target.flags.writeable:
        raise ValueError(f"{origin.size} bytes do not go into {target.size} writable ones")
    if library is None:
        np.copyto(target, origin)
        return reference.checksum(target.data)
    return int(library.kv_copy(_address(target), _address(origin), target.size, not soon_read))


def _bytes_of(data: Bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def _address(data: npt.NDArray[np.uint8]) -> int:
    return int(data.__array_interface__["data"][0])
