"""Memory of a GPU that another process of the host opens: CUDA's driver, by way of ctypes.

Functions and constants as in the CUDA Driver API, "Memory Management" and "Primary Context
Management". Nothing of CUDA is loaded before it is used. Not run on a GPU yet.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from baton.errors import ConfigError, HandoffError

_HANDLE_BYTES = 64
_LAZY_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class ExportedMemory:
    """Part of an allocation that others can open."""

    handle: bytes
    """Of the whole allocation."""
    offset: int
    """Where in it the part begins, in bytes."""


class OpenedMemory:
    """Another process's memory. It stays open as long as this object is there."""

    def __init__(self, exported: ExportedMemory, size: int, device: int) -> None:
        """``size`` bytes that are on the GPU of that number here. Raises HandoffError."""
        base = ctypes.c_uint64()
        handle = _Handle.from_buffer_copy(exported.handle)
        driver = _driver()
        with _context(device):
            error = driver.cuIpcOpenMemHandle_v2(
                ctypes.byref(base), handle, ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            )
        if error:
            raise HandoffError(f"CUDA cannot open the writer's blocks: error {error}")
        weakref.finalize(self, _close, base.value, device).atexit = False
        self.bytes = tensor_at(base.value + exported.offset, size, device)
        """uint8 [size]"""


def export(address: int, device: int) -> ExportedMemory:
    """Let other processes open the allocation that ``address`` lies in. Raises ConfigError."""
    driver = _driver()
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    with _context(device):
        error = driver.cuMemGetAddressRange_v2(
            ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
        )
        error = error or driver.cuIpcGetMemHandle(ctypes.byref(handle), base)
    if error:
        raise ConfigError(
            f"transport cuda_ipc cannot share the KV blocks, CUDA says error {error}; "
            "PYTORCH_CUDA_ALLOC_CONF must not ask for expandable_segments"
        )
    return ExportedMemory(bytes(handle), address - base.value)


def tensor_at(address: int, size: int, device: int) -> torch.Tensor:
    """uint8 [size] of a GPU's memory, which stays whoever's it is."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }

    # With any other device than the memory's own this would be a copy of it.
    return torch.as_tensor(Memory(), device=torch.device("cuda", device))


def device_name(device: int) -> str:
    """A GPU's UUID: the same in every process, whatever CUDA_VISIBLE_DEVICES says there."""
    return str(torch.cuda.get_device_properties(device).uuid)


def find_device(name: str, reader: int) -> int | None:
    """This process's number of the GPU that is so called, if GPU ``reader`` can read its memory."""
    for device in range(torch.cuda.device_count()):
        if device_name(device) == name:
            near = device == reader or torch.cuda.can_device_access_peer(reader, device)
            return device if near else None
    return None


def _close(base: int, device: int) -> None:
    with _context(device):
        _driver().cuIpcCloseMemHandle(ctypes.c_uint64(base))


@lru_cache(maxsize=1)
def _driver() -> Any:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ConfigError(f"transport cuda_ipc needs CUDA's driver: {error}") from error
    if error_code := driver.cuInit(0):
        raise ConfigError(f"transport cuda_ipc needs a GPU, CUDA says error {error_code}")
    return driver


@contextmanager
def _context(device: int) -> Iterator[None]:
    """The context that torch uses, made current on this thread, which may be a fresh one."""
    driver = _driver()
    number, context = ctypes.c_int(), ctypes.c_void_p()
    error = driver.cuDeviceGet(ctypes.byref(number), device)
    error = error or driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    if error:
        raise ConfigError(f"CUDA has no device {device}: error {error}")
    driver.cuCtxPushCurrent_v2(context)
    try:
        yield
    finally:
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        driver.cuDevicePrimaryCtxRelease_v2(number)
