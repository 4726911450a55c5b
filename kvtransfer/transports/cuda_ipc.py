"""Memory of a GPU that another process of the host opens, by CUDA's driver through ctypes.

A reader maps the writer's memory in the context of its own GPU, where its kernels run, and the
driver enables peer access from there. Only addresses are kept: CUDA_VISIBLE_DEVICES may hide the
writer's GPU, and torch refuses memory of a GPU that it does not see.

Functions and constants are those of the CUDA Driver API, "Memory Management", "Unified Addressing"
and "Primary Context Management". Nothing of CUDA is loaded before it is used. This module
has not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import uuid
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from baton.errors import ConfigError, HandoffError, WorkerFailed

log = logging.getLogger(__name__)

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1
_DEVICE_POINTER = 3


class _Handle(ctypes.Structure):
    """The driver's struct CUipcMemHandle, which its functions take by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """Part of a GPU allocation that other processes can open."""

    handle: bytes
    """CUDA's handle of the whole allocation."""
    offset: int
    """Offset of the part in the allocation, in bytes."""


class OpenedMemory:
    """Memory of another process, mapped for one GPU of this process until ``close`` is called."""

    def __init__(self, exported: ExportedMemory, size: int, reader: int) -> None:
        """Map ``size`` bytes so that kernels of GPU ``reader`` can read them.

        Raises HandoffError if that is impossible, and ConfigError if CUDA provides no context for
        the GPU. No kernel has accessed the memory by then, so the GPU remains usable.
        """
        base = ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(exported.handle)
        with _context(reader):
            error = _driver().cuIpcOpenMemHandle_v2(
                ctypes.byref(base), handle, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            )
        if error:
            raise HandoffError(f"CUDA cannot open the writer's blocks: {_name(error)}")
        # Called once, by ``close`` or by the garbage collector.
        self._unmap = weakref.finalize(self, _unmap, base.value, reader)
        self._unmap.atexit = False
        self._address = base.value + exported.offset
        self._lock = threading.Lock()
        self._readers = 0
        self._is_closed = False
        if error := _reach(self._address, size, reader):
            self.close()
            raise HandoffError(f"this GPU cannot read the writer's blocks: {_name(error)}")

    @contextmanager
    def reading(self) -> Iterator[int]:
        """Yield the address of the memory. The memory stays mapped within this context.

        Raises WorkerFailed if the memory was closed.
        """
        with self._lock:
            if self._is_closed:
                raise WorkerFailed("the writer's blocks were closed")
            self._readers += 1
        try:
            yield self._address
        finally:
            with self._lock:
                self._readers -= 1
                is_last = self._is_closed and not self._readers
            if is_last:
                self._unmap()

    def close(self) -> None:
        """Unmap the memory at once, or when the last ``reading`` context has ended; idempotent."""
        with self._lock:
            self._is_closed = True
            is_read = self._readers > 0
        if not is_read:
            self._unmap()


def export(address: int, device: int) -> ExportedMemory:
    """Let other processes open the allocation that contains ``address``. Raises ConfigError."""
    driver = _driver()
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with _context(device):
        error = driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        error = error or driver.cuIpcGetMemHandle(ctypes.byref(handle), base)
    if error:
        raise ConfigError(
            f"transport cuda_ipc cannot share the KV blocks: {_name(error)}; PYTORCH_ALLOC_CONF "
            "(PYTORCH_CUDA_ALLOC_CONF in older torch) must not ask for expandable_segments"
        )
    return ExportedMemory(bytes(handle), address - base.value)


def copy_bytes(target: int, source: int, size: int, device: int, stream: int) -> None:
    """Start a copy between two addresses that GPU ``device`` can access, on one of its streams.

    Any alignment is allowed. Raises HandoffError if the copy cannot start.
    """
    with _context(device):
        error = _driver().cuMemcpyDtoDAsync_v2(
            ctypes.c_uint64(target),
            ctypes.c_uint64(source),
            ctypes.c_size_t(size),
            ctypes.c_void_p(stream),
        )
    if error:
        raise HandoffError(f"CUDA cannot copy the writer's blocks: {_name(error)}")


def device_uuid(device: int) -> str:
    """Return a GPU's UUID. It is the same in every process, whatever the value of
    CUDA_VISIBLE_DEVICES.

    Raises ConfigError if there is no such GPU.
    """
    found = (ctypes.c_ubyte * 16)()
    number = _device(device)
    if error := _driver().cuDeviceGetUuid_v2(ctypes.byref(found), number):
        raise ConfigError(f"CUDA reports no UUID for device {device}: {_name(error)}")
    return str(uuid.UUID(bytes=bytes(found)))


def _reach(address: int, size: int, reader: int) -> int:
    """Return 0 if kernels of GPU ``reader`` can access all ``size`` bytes from ``address``, else
    CUDA's error code."""
    found = ctypes.c_uint64()
    driver = _driver()
    with _context(reader):
        for byte in (address, address + size - 1):
            if error := driver.cuPointerGetAttribute(
                ctypes.byref(found), ctypes.c_int(_DEVICE_POINTER), ctypes.c_uint64(byte)
            ):
                return int(error)
    return 0


def _unmap(base: int, reader: int) -> None:
    with _context(reader):
        error = _driver().cuIpcCloseMemHandle(ctypes.c_uint64(base))
    if error:
        log.warning("CUDA did not close a writer's blocks: %s", _name(error))


def _name(error: int) -> str:
    name = ctypes.c_char_p()
    _driver().cuGetErrorName(ctypes.c_int(error), ctypes.byref(name))
    return f"{(name.value or b'an unknown error').decode()} ({error})"


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"transport cuda_ipc needs CUDA's driver: {error}") from error
    if error_code := driver.cuInit(0):
        raise ConfigError(f"transport cuda_ipc needs a GPU: CUDA reports error {error_code}")
    return driver


def _device(device: int) -> ctypes.c_int:
    number = ctypes.c_int()
    if error := _driver().cuDeviceGet(ctypes.byref(number), ctypes.c_int(device)):
        raise ConfigError(f"CUDA has no device {device}: {_name(error)}")
    return number


@contextmanager
def _context(device: int) -> Iterator[None]:
    """Make torch's CUDA context of ``device`` current on the calling thread, within this context.
    The thread may be new to CUDA."""
    driver = _driver()
    number, context = _device(device), ctypes.c_void_p()
    if error := driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number):
        raise ConfigError(f"CUDA provides no context for device {device}: {_name(error)}")
    try:
        if error := driver.cuCtxPushCurrent_v2(context):
            raise ConfigError(f"CUDA rejects the context of device {device}: {_name(error)}")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(number)
