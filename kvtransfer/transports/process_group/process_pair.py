"""Process groups of torch.distributed with two ranks: the writer is rank 0, the receiver rank 1.

They are built without ``init_process_group``: nothing of them is global to the process. An
operation that has failed, or an abort, leaves a pair of no more use; another is formed. A message
waits in a staging buffer between the blocks and the wire.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed
from torch.distributed.distributed_c10d import Work

from baton.errors import ConfigError
from kvtransfer.transports.process_group.rendezvous import PairStore

WRITER, RECEIVER = 0, 1
MAX_TAG = (1 << 31) - 2
_ABORT_TAG = MAX_TAG + 1
_ABORT = timedelta(milliseconds=1)
_ONE_DAY = timedelta(days=1)
_POLL_S = 0.0002
_NCCL_SETTINGS = {
    # 2, clean up only: what fails is aborted and reported. The default would end the whole process,
    # which serves other pairs.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # Its monitor ends a process whose communicator does not answer; our own deadlines do that.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class ProcessPair(Protocol):
    """A process group of two. Used by one thread, but for ``abort``."""

    def send(self, data: torch.Tensor, tag: int) -> Work:
        """Begin to send a contiguous uint8 tensor. ``tag`` is at most MAX_TAG."""

    def receive(self, data: torch.Tensor, tag: int) -> Work:
        """Begin to receive a message of exactly this tensor's bytes."""

    def wait(self, work: Work, timeout_s: float) -> None:
        """Until it has ended. Raises RuntimeError: it failed, was late, or ``abort`` was called."""

    def abort(self) -> None:
        """End what is under way, here and at the other end. From any thread; idempotent."""


class GlooPair:
    """Over TCP, between tensors in the host's memory."""

    def __init__(self, store: PairStore, rank: int, host: str, timeout_s: float) -> None:
        """Blocks until both have formed it. ``host`` is where this end listens.

        Raises RuntimeError after ``timeout_s`` seconds, and what the store raises.
        """
        from torch.distributed.distributed_c10d import ProcessGroupGloo  # noqa: PLC0415

        self._other = 1 - rank
        gloo: Any = ProcessGroupGloo  # torch's stubs say less than there is
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # only collective operations use them
        options._devices = [gloo.create_device(hostname=host)]
        self._group = gloo(store, rank, 2, options)

    def send(self, data: torch.Tensor, tag: int) -> Work:
        """See ``ProcessPair``."""
        work: Work = self._group.send([data], self._other, tag)
        return work

    def receive(self, data: torch.Tensor, tag: int) -> Work:
        """See ``ProcessPair``."""
        work: Work = self._group.recv([data], self._other, tag)
        return work

    def wait(self, work: Work, timeout_s: float) -> None:
        """See ``ProcessPair``."""
        # No shorter: zero means for ever.
        work.wait(max(timedelta(seconds=timeout_s), _ABORT))

    def abort(self) -> None:
        """See ``ProcessPair``.

        Gloo has no abort, but an operation that is late ends all others and the connection, so
        this begins one for which no message will come.
        """
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1)], self._other, _ABORT_TAG).wait(_ABORT)


class NcclPair:
    """Over NVLink, PCIe or the network, between tensors of two GPUs."""

    def __init__(self, store: PairStore, rank: int, device: torch.device) -> None:
        """The communicator is made by the first operation, which blocks until both are there."""
        from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415

        self._other = 1 - rank
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._aborted = threading.Event()
        nccl: Any = ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _ONE_DAY  # the link has deadlines of its own
        self._group = nccl(store, rank, 2, options)

    def send(self, data: torch.Tensor, tag: int) -> Work:
        """See ``ProcessPair``. NCCL has no tags: the order counts alone."""
        with torch.cuda.stream(self._stream):
            work: Work = self._group.send([data], self._other, tag)
        return work

    def receive(self, data: torch.Tensor, tag: int) -> Work:
        """See ``ProcessPair``."""
        with torch.cuda.stream(self._stream):
            work: Work = self._group.recv([data], self._other, tag)
        return work

    def wait(self, work: Work, timeout_s: float) -> None:
        """See ``ProcessPair``. An operation that was aborted looks like one that is done."""
        until = time.monotonic() + timeout_s
        while not (work.is_completed() or self._aborted.is_set()):
            if time.monotonic() >= until:
                raise RuntimeError(f"NCCL did not end within {timeout_s:.1f} s")
            time.sleep(_POLL_S)
        if self._aborted.is_set():
            raise RuntimeError("NCCL was aborted")

    def abort(self) -> None:
        """See ``ProcessPair``. The flag ends what waits here, whatever NCCL takes to end."""
        if not self._aborted.is_set():
            self._aborted.set()
            threading.Thread(target=self._group.abort, name="kv-nccl-abort", daemon=True).start()


def check_nccl(device: str) -> None:
    """Make NCCL ready for blocks on ``device``. Raises ConfigError where it cannot be used."""
    if not torch.distributed.is_nccl_available():
        raise ConfigError("this torch has no NCCL: transport nccl needs a build of torch for CUDA")
    if not torch.cuda.is_available():
        raise ConfigError("transport nccl needs an NVIDIA GPU, and torch sees none")
    if not device.startswith("cuda"):
        raise ConfigError(f"transport nccl needs KV blocks on a GPU; they are on {device}")
    for name, value in _NCCL_SETTINGS.items():
        os.environ[name] = value


def check_gloo() -> None:
    """Raises ConfigError where gloo cannot be used."""
    if not torch.distributed.is_gloo_available():
        raise ConfigError("this torch has no gloo")


class StagingBuffer(Protocol):
    """Bytes that the host writes or reads, and a process group sends or receives."""

    @property
    def view(self) -> memoryview:
        """Of the host's bytes."""

    def tensor(self, length: int) -> torch.Tensor:
        """The first ``length`` bytes as the process group takes them, uint8 [length]."""

    def upload(self, length: int) -> None:
        """Bring what the host has written to where ``tensor`` is."""

    def download(self, length: int) -> None:
        """Bring what was received to where the host reads it."""


class HostBuffer:
    """In the host's memory. The kernel gives pages only to what was used."""

    def __init__(self, capacity: int) -> None:
        """``capacity`` in bytes."""
        self._bytes = torch.empty(capacity, dtype=torch.uint8)
        self.view = self._bytes.numpy().data

    def tensor(self, length: int) -> torch.Tensor:
        """See ``StagingBuffer``."""
        return self._bytes[:length]

    def upload(self, length: int) -> None:
        """See ``StagingBuffer``: it is there."""

    def download(self, length: int) -> None:
        """See ``StagingBuffer``: it is there."""


class DeviceBuffer:
    """On a GPU, with a pinned twin in the host's memory."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """``capacity`` in bytes, of each of the two."""
        self._host = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(capacity, dtype=torch.uint8, device=device)
        # Of its own: the default stream would wait for the engine's kernels.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.view = self._host.numpy().data

    def tensor(self, length: int) -> torch.Tensor:
        """See ``StagingBuffer``."""
        return self._device[:length]

    def upload(self, length: int) -> None:
        """See ``StagingBuffer``."""
        self._copy(self._device[:length], self._host[:length])

    def download(self, length: int) -> None:
        """See ``StagingBuffer``."""
        self._copy(self._host[:length], self._device[:length])

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()
