"""CUDA's driver as ``kvtransfer.transports.cuda_ipc`` calls it, with the host's memory in place
of GPUs'."""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

OK, INVALID_VALUE, INVALID_DEVICE, INVALID_CONTEXT, PEER_UNSUPPORTED = 0, 1, 101, 201, 217
_NAMES = {
    INVALID_VALUE: b"CUDA_ERROR_INVALID_VALUE",
    INVALID_DEVICE: b"CUDA_ERROR_INVALID_DEVICE",
    INVALID_CONTEXT: b"CUDA_ERROR_INVALID_CONTEXT",
    PEER_UNSUPPORTED: b"CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
}


def gpu_uuid(gpu: int) -> str:
    """Of the machine's GPU of that number."""
    return str(uuid.UUID(int=gpu + 1))


@dataclass(frozen=True)
class Allocation:
    """Memory that is said to be on a GPU."""

    base: int
    size: int
    gpu: int


class FakeCuda:
    """The driver in one process, which sees some of a machine's GPUs.

    It is as strict as the real one: memory that was opened is mapped for the GPU whose context was
    current, and nowhere else. What a correct caller never does is recorded in ``misuses``.
    """

    def __init__(
        self, visible: Sequence[int], machine: dict[bytes, Allocation], peers: bool = True
    ) -> None:
        """``machine``: what its processes have exported, by handle; ``peers``: GPUs reach others.

        The process's number of a GPU is its place in ``visible``.
        """
        self.visible = visible
        self.peers = peers
        self.machine = machine
        self.own: list[Allocation] = []
        """Allocations of this process."""
        self.errors: dict[str, int] = {}
        """What functions of these names answer, whatever they are asked."""
        self.opened: list[int] = []
        """For which GPU each successful open was."""
        self.closed: list[int] = []
        """For which GPU each successful close was."""
        self.mapped: Counter[tuple[int, int]] = Counter()
        """How often memory is open: by the GPU that it is mapped for, and its base."""
        self.retained: Counter[int] = Counter()
        """Contexts, by device."""
        self.misuses: list[str] = []
        self._current = threading.local()

    def cuDeviceGet(self, device: Any, number: Any) -> int:  # noqa: N802 - CUDA's name
        if not 0 <= number.value < len(self.visible):
            return INVALID_DEVICE
        device._obj.value = number.value
        return self._answer("cuDeviceGet")

    def cuDeviceGetUuid_v2(self, found: Any, device: Any) -> int:  # noqa: N802
        name = uuid.UUID(gpu_uuid(self.visible[device.value]))
        ctypes.memmove(found._obj, name.bytes, 16)
        return self._answer("cuDeviceGetUuid_v2")

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:  # noqa: N802
        if error := self._answer("cuDevicePrimaryCtxRetain"):
            return error
        self.retained[device.value] += 1
        context._obj.value = 1000 + device.value
        return OK

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:  # noqa: N802
        self.retained[device.value] -= 1
        return OK

    def cuCtxPushCurrent_v2(self, context: Any) -> int:  # noqa: N802
        if error := self._answer("cuCtxPushCurrent_v2"):
            return error
        self._stack.append(context.value)
        return OK

    def cuCtxPopCurrent_v2(self, context: Any) -> int:  # noqa: N802
        context._obj.value = self._stack.pop()
        return OK

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:  # noqa: N802
        for each in self.own:
            if each.base <= address.value < each.base + each.size and each.gpu == self.gpu:
                base._obj.value, size._obj.value = each.base, each.size
                return self._answer("cuMemGetAddressRange_v2")
        return self._misuse("address range of what is not this GPU's", INVALID_VALUE)

    def cuIpcGetMemHandle(self, handle: Any, base: Any) -> int:  # noqa: N802
        if error := self._answer("cuIpcGetMemHandle"):
            return error
        allocation = next(each for each in self.own if each.base == base.value)
        key = base.value.to_bytes(8, "little") * 8
        self.machine[key] = allocation
        ctypes.memmove(ctypes.addressof(handle._obj), key, len(key))
        return OK

    def cuIpcOpenMemHandle_v2(self, base: Any, handle: Any, flags: Any) -> int:  # noqa: N802
        if error := self._answer("cuIpcOpenMemHandle_v2"):
            return error
        gpu, allocation = self.gpu, self.machine.get(bytes(handle))
        if gpu is None:
            return self._misuse("open without a context", INVALID_CONTEXT)
        if flags.value != 1 or allocation is None:
            return INVALID_VALUE
        if allocation.gpu != gpu and not self.peers:
            return PEER_UNSUPPORTED
        self.mapped[gpu, allocation.base] += 1
        self.opened.append(gpu)
        base._obj.value = allocation.base
        return OK

    def cuIpcCloseMemHandle(self, base: Any) -> int:  # noqa: N802
        gpu = self.gpu
        if gpu is None or not self.mapped[gpu, base.value]:
            return self._misuse("close of what is not open in this context", INVALID_VALUE)
        self.mapped[gpu, base.value] -= 1
        self.closed.append(gpu)
        return self._answer("cuIpcCloseMemHandle")

    def cuPointerGetAttribute(self, found: Any, attribute: Any, address: Any) -> int:  # noqa: N802
        if error := self._answer("cuPointerGetAttribute"):
            return error
        if attribute.value != 3 or not self.reaches(address.value):
            return INVALID_VALUE
        found._obj.value = address.value
        return OK

    def cuMemcpyDtoDAsync_v2(  # noqa: N802
        self, target: Any, source: Any, size: Any, stream: Any
    ) -> int:
        if error := self._answer("cuMemcpyDtoDAsync_v2"):
            return error
        if not self.reaches(source.value) or not self.reaches(source.value + size.value - 1):
            return self._misuse("copy from what is not mapped", INVALID_VALUE)
        ctypes.memmove(target.value, source.value, size.value)
        return OK

    def cuGetErrorName(self, error: Any, name: Any) -> int:  # noqa: N802
        name._obj.value = _NAMES.get(error.value)
        return OK if error.value in _NAMES else INVALID_VALUE

    @property
    def gpu(self) -> int | None:
        """The machine's number of the GPU whose context is current on this thread."""
        return self.visible[self._stack[-1] - 1000] if self._stack else None

    @property
    def is_balanced(self) -> bool:
        """Whether every context was given back, and none is left current on this thread."""
        return not self._stack and not any(self.retained.values())

    def reaches(self, address: int) -> bool:
        """Whether kernels in the current context can read what others have exported there."""
        return any(
            each.base <= address < each.base + each.size
            for each in self.machine.values()
            if self.gpu is not None and self.mapped[self.gpu, each.base]
        )

    @property
    def _stack(self) -> list[int]:
        stack: list[int] = self._current.__dict__.setdefault("stack", [])
        return stack

    def _answer(self, function: str) -> int:
        return self.errors.get(function, OK)

    def _misuse(self, what: str, error: int) -> int:
        self.misuses.append(what)
        return error
