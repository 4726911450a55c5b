"""A pool of KV blocks that other processes of the host can read.

It is an anonymous file in memory, without a name and limited only by the machine. Its owner holds a
descriptor. Another process of the same user opens that through /proc, and maps it read-only. The
file's length is sealed (memfd_create(2), fcntl(2)), so no mapping of it ever faults. A process that
has mapped it keeps its bytes, even after the owner was killed.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import stat
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from baton.errors import HandoffError
from baton.host.host_memory import check_available, populate, too_much
from kvtransfer.memory.memory import SharedFile
from kvtransfer.memory.seal_board import BOARD_BYTES

_LARGE_PAGE = 2 << 20
_MAP_FIXED = 0x10
"""Linux's value of the mmap(2) flag MAP_FIXED, the same on every machine that Baton supports."""
_WORD_BYTES = 8
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@dataclass(frozen=True, slots=True)
class SharedPool:
    """A pool of KV blocks that this process has allocated. The memory lasts until nothing refers to
    ``data``."""

    data: npt.NDArray[np.uint8]
    """The pool's memory, uint8 [bytes], initially zeros."""
    file: SharedFile

    def close(self) -> None:
        """Prevent other processes from mapping the pool from now on. Existing mappings stay. Call
        it once."""
        os.close(self.file.descriptor)


def allocate(size: int) -> SharedPool:
    """Allocate a pool of ``size`` bytes at once, and a board for checksums behind it in the same
    file. Raises ConfigError if the machine has less memory."""
    descriptor = os.memfd_create("baton-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        start = -(-size // _WORD_BYTES) * _WORD_BYTES
        memory = _taken(descriptor, start + BOARD_BYTES)
        board = memory[start:].view(np.uint64)
        return SharedPool(memory[:size], SharedFile(descriptor, memory.size, board))
    except BaseException:
        os.close(descriptor)
        raise


def _taken(descriptor: int, size: int) -> npt.NDArray[np.uint8]:
    check_available(size)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        memory, start = _map_aligned(descriptor, size)
        populate(memory, start, size)
        # Fills what the mapping lacks on kernels that cannot populate one. A reader of a missing
        # page would be killed if the machine had no memory left.
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise too_much(size, error) from error
    return np.frombuffer(memory, dtype=np.uint8)[start : start + size]


def _map_aligned(descriptor: int, size: int) -> tuple[mmap.mmap, int]:
    """Map the pool's file at an address that is a multiple of a large page's size. At other
    addresses, the kernel would not use large pages.

    The mapping is inside a larger, empty mapping, and is removed together with it. Returns the
    larger mapping, and the offset of the file's first byte in it.
    """
    room = mmap.mmap(-1, size + _LARGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(room))
    start = -address % _LARGE_PAGE
    c_mmap = ctypes.CDLL(None, use_errno=True).mmap
    c_mmap.restype = ctypes.c_void_p
    c_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
    where = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    if c_mmap(address + start, size, *where, descriptor, 0) != address + start:
        raise OSError(ctypes.get_errno(), "mmap")
    return room, start


def inode_of(file: SharedFile) -> int:
    """Return the inode number of a shared file. With this number, ``open_shared`` checks on the
    same host that it has opened the right file."""
    return os.fstat(file.descriptor).st_ino


def open_shared(process_id: int, descriptor: int, inode: int, size: int) -> npt.NDArray[np.uint8]:
    """Map another process's pool of ``size`` bytes read-only. It stays mapped as long as the
    returned array is referenced.

    ``descriptor`` is the file's descriptor in that process; ``inode`` and ``size`` identify the
    expected file. Raises HandoffError if the file cannot be opened (the process has ended, belongs
    to another user or runs in another container), or if it is another file.
    """
    name = f"the KV pool of process {process_id}"
    try:
        # Non-blocking, because another file there may be a pipe.
        ours = os.open(
            f"/proc/{process_id}/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        )
    except OSError as error:
        raise HandoffError(f"{name} cannot be opened: {error.strerror}") from error
    return map_shared(ours, inode, size, name)


def map_shared(descriptor: int, inode: int, size: int, name: str) -> npt.NDArray[np.uint8]:
    """Map the pool behind a descriptor read-only, and close the descriptor. ``name`` is the pool in
    error messages. Raises HandoffError if it is another file than expected, or not sealed."""
    try:
        _check(descriptor, inode, size, name)
        memory = mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    except OSError as error:
        raise HandoffError(f"{name} cannot be mapped: {error.strerror}") from error
    finally:
        os.close(descriptor)
    return np.frombuffer(memory, dtype=np.uint8)


def _check(descriptor: int, inode: int, size: int, name: str) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or (found.st_ino, found.st_size) != (inode, size):
        raise HandoffError(
            f"{name} is not the one that was offered: inode {found.st_ino} of {found.st_size} "
            f"bytes instead of inode {inode} of {size} bytes"
        )
    # Otherwise its owner could shorten it, and this process would be killed when it reads.
    if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
        raise HandoffError(f"{name} is not sealed")
