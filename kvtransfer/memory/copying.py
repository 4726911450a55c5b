"""Checksums of bytes of this host, and copies that give the checksum of what they wrote.

``kvtransfer.memory.checksum`` says what a checksum is; here it is computed at the speed of the
memory, in C++ (``native/copy.cpp``). Without a C++ compiler numpy computes, several times slower.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
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
    """The library, or None where numpy is to compute; the reason is logged once.

    The first call may build it, which takes seconds.
    """
    try:
        library = CppLibrary(_FOLDER, _TARGET).load()
    except ConfigError as error:
        log.warning("numpy copies KV blocks, several times slower: %s", error)
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
    """``kvtransfer.memory.checksum.checksum`` of up to 16 GiB. Releases the GIL."""
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


@dataclass(frozen=True, slots=True)
class Run:
    """Several parts of equal length in one piece of memory."""

    data: npt.NDArray[np.uint8]
    """All of it, [bytes]."""
    starts: npt.NDArray[np.int64]
    """Where each part begins, [parts]."""
    length: int
    """Bytes of each part."""

    def part(self, index: int) -> npt.NDArray[np.uint8]:
        """One of them."""
        start = int(self.starts[index])
        return self.data[start : start + self.length]

    def check(self) -> None:
        """Raises ValueError where a part lies outside."""
        if self.starts.size and not (
            self.starts.min() >= 0 and self.starts.max() + self.length <= self.data.size
        ):
            raise ValueError(f"parts of {self.length} bytes lie outside {self.data.size} bytes")


def checksum_many(source: Run) -> tuple[int, ...]:
    """``checksum`` of each part. In one go: a call costs more than a small part."""
    source.check()
    library = copy_library()
    if library is None:
        return tuple(checksum(source.part(index)) for index in range(source.starts.size))
    return _copy_many(library, None, source, soon_read=False)


def copy_many(to: Run, source: Run, *, soon_read: bool = False) -> tuple[int, ...]:
    """``copy`` of each part to the one at its place. In one go."""
    to.check()
    source.check()
    if (to.length, to.starts.size) != (source.length, source.starts.size):
        raise ValueError("the parts of source and target are not alike")
    if not to.data.flags.writeable:
        raise ValueError("the target is read-only")
    library = copy_library()
    if library is None:
        count = range(to.starts.size)
        return tuple(copy(to.part(index), source.part(index)) for index in count)
    return _copy_many(library, to, source, soon_read=soon_read)


def copy_out(outs: Sequence[Bytes], source: Run) -> tuple[int, ...]:
    """``copy`` of each part to the one of ``outs`` at its place; they are soon read. In one go.

    Raises ValueError where they are not as many and as long, or read-only.
    """
    source.check()
    targets = [_bytes_of(out) for out in outs]
    if len(targets) != source.starts.size or any(
        target.size != source.length or not target.flags.writeable for target in targets
    ):
        raise ValueError("the parts of source and target are not alike")
    library = copy_library()
    if library is None:
        count = range(source.starts.size)
        return tuple(copy(targets[i], source.part(i), soon_read=True) for i in count)
    addresses = np.array([_address(target) for target in targets], dtype=np.int64)
    return _copy_addresses(library, addresses, source, soon_read=True)


def copy_out_pieces(
    outs: Sequence[Bytes], at: npt.NDArray[np.int64], source: Run
) -> tuple[int, ...]:
    """``copy`` of parts into places ``at`` of each of ``outs``, in their order. In one go.

    The first ``len(at)`` parts of ``source`` go into the first of ``outs``, and so on. Raises
    ValueError where they are not as many, do not fit, or where one is read-only.
    """
    source.check()
    targets = [_bytes_of(out) for out in outs]
    if len(targets) * at.size != source.starts.size or not all(
        target.flags.writeable and at.min() >= 0 and at.max() + source.length <= target.size
        for target in targets
    ):
        raise ValueError("the parts do not fit their places")
    library = copy_library()
    if library is None:
        places = [target[start : start + source.length] for target in targets for start in at]
        return tuple(copy(to, source.part(i), soon_read=True) for i, to in enumerate(places))
    addresses = np.array([_address(target) for target in targets], dtype=np.int64)
    return _copy_addresses(library, (addresses[:, None] + at).reshape(-1), source, soon_read=True)


def _copy_many(
    library: ctypes.CDLL, to: Run | None, source: Run, *, soon_read: bool
) -> tuple[int, ...]:
    targets = None if to is None else to.starts + _address(to.data)
    return _copy_addresses(library, targets, source, soon_read=soon_read)


def _copy_addresses(
    library: ctypes.CDLL, targets: npt.NDArray[np.int64] | None, source: Run, *, soon_read: bool
) -> tuple[int, ...]:
    origins = source.starts + _address(source.data)
    sums = np.empty(source.starts.size, dtype=np.uint64)
    library.kv_copy_many(
        None if targets is None else _address(targets),
        _address(origins),
        sums.size,
        source.length,
        not soon_read,
        _address(sums),
    )
    return tuple(sums.tolist())


def _bytes_of(data: Bytes) -> npt.NDArray[np.uint8]:
    return np.frombuffer(data, dtype=np.uint8)


def _address(data: npt.NDArray[Any]) -> int:
    return int(data.__array_interface__["data"][0])
