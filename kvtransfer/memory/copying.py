"""Checksums of bytes of this host, and copies that return the checksum of what they wrote.

``kvtransfer.memory.checksum`` defines the checksum; here C++ code computes it at the speed of the
memory (``native/copy.cpp``). Without a C++ compiler numpy computes it, several times slower.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError
from baton.host.cpp_library import NATIVE, CppLibrary
from kvtransfer.memory import checksum as reference

log = logging.getLogger(__name__)

Bytes = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
"""Contiguous bytes, of any shape and item size."""
_FOLDER = Path(__file__).parents[1] / "native"
_TARGET = NATIVE


@lru_cache(maxsize=1)
def copy_library() -> ctypes.CDLL | None:
    """Return the C++ library that copies and computes checksums.

    Returns None, and logs the reason once, if numpy has to compute instead. The first call may
    build the library, which takes seconds.
    """
    try:
        library = CppLibrary(_FOLDER, _TARGET).load()
    except ConfigError as error:
        log.warning("using numpy to copy KV blocks, which is several times slower: %s", error)
        return None
    address, size = ctypes.c_void_p, ctypes.c_int64
    library.kv_checksum.argtypes = [address, size]
    library.kv_checksum.restype = ctypes.c_uint64
    library.kv_copy.argtypes = [address, address, size, ctypes.c_int]
    library.kv_copy.restype = ctypes.c_uint64
    library.kv_copy_many.argtypes = [address, address, size, size, ctypes.c_int, address]
    library.kv_copy_many.restype = None
    return library


def checksum(data: Bytes) -> int:
    """Compute the checksum of up to 16 GiB, as ``kvtransfer.memory.checksum.checksum`` defines it.
    Releases the GIL."""
    source, library = _bytes_of(data), copy_library()
    if library is None:
        return reference.checksum(source.data)
    return int(library.kv_checksum(_address(source), source.size))


def copy(to: Bytes, source: Bytes, *, soon_read: bool = False) -> int:
    """Copy up to 16 GiB between two buffers that do not overlap. Returns the checksum of the
    written bytes.

    ``source`` is read once, so the checksum is that of the copy even if ``source`` changes
    meanwhile. With ``soon_read``, the copy stays in the CPU's caches; otherwise it bypasses them.
    Releases the GIL. Raises ValueError if ``to`` and ``source`` differ in length, or ``to`` is
    read-only.
    """
    target, origin, library = _bytes_of(to), _bytes_of(source), copy_library()
    if target.size != origin.size or not target.flags.writeable:
        raise ValueError(f"cannot copy {origin.size} bytes into {target.size} writable bytes")
    if library is None:
        np.copyto(target, origin)
        return reference.checksum(target.data)
    return int(library.kv_copy(_address(target), _address(origin), target.size, not soon_read))


def checksum_many(
    source: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    length: int,
) -> tuple[int, ...]:
    """Compute the checksums of several parts of ``source``. Each part has ``length``
    bytes and begins at one of the offsets ``starts``.

    All parts are handled in one call, because a call costs more than a small part. Raises
    ValueError if a part is outside ``source``.
    """
    _check(source, starts, length)
    library = copy_library()
    if library is None:
        return _sums([source[start : start + length] for start in starts])
    return _copy_many(library, None, starts + _address(source), length, soon_read=False)


def copy_many(
    to: npt.NDArray[np.uint8],
    places: npt.NDArray[np.int64],
    source: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    length: int,
    *,
    soon_read: bool = False,
) -> tuple[int, ...]:
    """Copy several parts of ``source`` to the offsets ``places`` in ``to``. Each part has
    ``length`` bytes and begins at one of the offsets ``starts``.

    Returns the checksum of each part. Raises ValueError if a part is outside ``source`` or
    ``to``, or ``to`` is read-only.
    """
    _check(to, places, length)
    _check(source, starts, length)
    if places.size != starts.size:
        raise ValueError("source and target must have the same number of parts")
    if not to.flags.writeable:
        raise ValueError("the target is read-only")
    library = copy_library()
    if library is None:
        targets = [to[place : place + length] for place in places]
        for target, start in zip(targets, starts, strict=True):
            np.copyto(target, source[start : start + length])
        return _sums(targets)
    targets_at, origins = places + _address(to), starts + _address(source)
    return _copy_many(library, targets_at, origins, length, soon_read=soon_read)


def copy_out(
    outs: Sequence[Bytes],
    source: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    length: int,
    at: npt.NDArray[np.int64] | None = None,
) -> tuple[int, ...]:
    """Copy parts of ``source``, in order, into the buffers ``outs``. The buffers are read soon
    afterwards. Returns the checksum of each part.

    Each buffer gets one part. With ``at``, each buffer gets one part at each of these offsets.
    Raises ValueError if the number of parts differs, they do not fit, or a buffer is read-only.
    """
    _check(source, starts, length)
    targets = [_bytes_of(out) for out in outs]
    pieces = np.zeros(1, dtype=np.int64) if at is None else at
    if (
        len(targets) * pieces.size != starts.size
        or not all(
            target.flags.writeable and pieces.min() >= 0 and pieces.max() + length <= target.size
            for target in targets
        )
        or (at is None and any(target.size != length for target in targets))
    ):
        raise ValueError("source and target must have the same number and size of parts")
    library = copy_library()
    if library is None:
        places = [target[place : place + length] for target in targets for place in pieces]
        for to, start in zip(places, starts, strict=True):
            np.copyto(to, source[start : start + length])
        return _sums(places)
    addresses = np.array([_address(target) for target in targets], dtype=np.int64)
    addresses = (addresses[:, None] + pieces).reshape(-1)
    return _copy_many(library, addresses, starts + _address(source), length, soon_read=True)


def _sums(parts: Sequence[npt.NDArray[np.uint8]]) -> tuple[int, ...]:
    """Compute checksums with numpy."""
    return tuple(reference.checksum(part.data) for part in parts)


def _check(data: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], length: int) -> None:
    """Raise ValueError if a part of ``length`` bytes from one of ``starts`` is outside ``data``."""
    if starts.size and not (starts.min() >= 0 and starts.max() + length <= data.size):
        raise ValueError(f"parts of {length} bytes lie outside {data.size} bytes")


def _copy_many(
    library: ctypes.CDLL,
    targets: npt.NDArray[np.int64] | None,
    origins: npt.NDArray[np.int64],
    length: int,
    *,
    soon_read: bool,
) -> tuple[int, ...]:
    """Copy from the addresses ``origins`` to the addresses ``targets``, and return the checksums.

    Without ``targets``, only these are computed.
    """
    sums = np.empty(origins.size, dtype=np.uint64)
    library.kv_copy_many(
        None if targets is None else _address(targets),
        _address(origins),
        sums.size,
        length,
        not soon_read,
        _address(sums),
    )
    return tuple(sums.tolist())


def _bytes_of(data: Bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def _address(data: npt.NDArray[Any]) -> int:
    return int(data.__array_interface__["data"][0])
