"""Process groups of torch.distributed with two ranks: the writer is rank 0, the receiver rank 1.

They are built without ``init_process_group``, so they share no global state. After a failed
operation or an abort, a pair is unusable and another one is formed. A message waits in a staging
buffer between the blocks and the wire.
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
    # 2, clean up only: a failed operation is aborted and reported. The default would end the whole
    # process, which serves other pairs.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # NCCL's monitor ends a process whose communicator does not answer; the link's own deadlines
    # handle that.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class ProcessPair(Protocol):
    """A process group of two processes. Only one thread may use it, but any thread may call
    ``abort``."""

    def send(self, data: torch.Tensor, tag: int) -> Work:
        """Start to send ``data``, a contiguous uint8 tensor. ``tag`` is at most MAX_TAG."""

    def receive(self, data: torch.Tensor, tag: int) -> Work:
        """Start to receive a message into ``data``. The message must have exactly its size in
        bytes."""

    def wait(self, work: Work, timeout_s: float) -> None:
        """Wait until a send or receive has ended.

        Raises RuntimeError if it failed, was late, or ``abort`` was called.
        """

    def abort(self) -> None:
        """End all sends and receives, in this process and in the other one. Any thread may call
        this; idempotent."""


class GlooPair:
    """A process group of two processes over TCP, for tensors in host memory."""

    def __init__(self, store: PairStore, rank: int, host: str, timeout_s: float) -> None:
        """Form the process group: wait until both processes have joined. This process listens on
        ``host``.

        Raises RuntimeError after ``timeout_s`` seconds, and the errors of the store.
        """
        from torch.distributed.distributed_c10d import ProcessGroupGloo  # noqa: PLC0415

        self._other = 1 - rank
        gloo: Any = ProcessGroupGloo  # torch's stubs lack parts of it
        options = gloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # only collective operations use them
        options._devices = [gloo.create_device(hostname=host)]
        self._group = gloo(store, rank, 2, options)

    def send(self, data: torch.Tensor, tag: int) -> Work:
        """Start to send the tensor ``data``. See ``ProcessPair``."""
        work: Work = self._group.send([data], self._other, tag)
        return work

    def receive(self, data: torch.Tensor, tag: int) -> Work:
        """Start to receive a message into the tensor ``data``. See ``ProcessPair``."""
        work: Work = self._group.recv([data], self._other, tag)
        return work

    def wait(self, work: Work, timeout_s: float) -> None:
        """Wait until a send or receive has ended. See ``ProcessPair``."""
        # At least this long, because zero means forever.
        work.wait(max(timedelta(seconds=timeout_s), _ABORT))

    def abort(self) -> None:
        """End all sends and receives of this pair. See ``ProcessPair``.

        Gloo has no abort. But an operation that times out ends all others and the connection. So
        this starts an operation for which no message arrives.
        """
        with contextlib.suppress(RuntimeError):
            self._group.recv([torch.empty(1)], self._other, _ABORT_TAG).wait(_ABORT)


class NcclPair:
    """A process group of two processes over NVLink, PCIe or the network, for tensors on two
    GPUs."""

    def __init__(self, store: PairStore, rank: int, device: torch.device) -> None:
        """Prepare the process group. The first send or receive forms it, and blocks until both
        processes have joined."""
        from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415

        self._other = 1 - rank
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._aborted = threading.Event()
        nccl: Any = ProcessGroupNCCL
        options = nccl.Options()
        options._timeout = _ONE_DAY  # the link has its own deadlines
        self._group = nccl(store, rank, 2, options)

    def send(self, data: torch.Tensor, tag: int) -> Work:
        """Start to send the tensor ``data``. NCCL has no tags, so messages are matched by their
        order. See ``ProcessPair``."""
        with torch.cuda.stream(self._stream):
            work: Work = self._group.send([data], self._other, tag)
        return work

    def receive(self, data: torch.Tensor, tag: int) -> Work:
        """Start to receive a message into the tensor ``data``. See ``ProcessPair``."""
        with torch.cuda.stream(self._stream):
            work: Work = self._group.recv([data], self._other, tag)
        return work

    def wait(self, work: Work, timeout_s: float) -> None:
        """Wait until a send or receive has ended. NCCL reports an aborted operation as finished, so
        a flag shows whether it was aborted. See ``ProcessPair``."""
        until = time.monotonic() + timeout_s
        while not (work.is_completed() or self._aborted.is_set()):
            if time.monotonic() >= until:
                raise RuntimeError(f"NCCL did not end within {timeout_s:.1f} s")
            time.sleep(_POLL_S)
        if self._aborted.is_set():
            raise RuntimeError("NCCL was aborted")

    def abort(self) -> None:
        """End all sends and receives of this pair. A flag ends the waits in this process, even if
        NCCL needs a long time to end. See ``ProcessPair``."""
        if not self._aborted.is_set():
            self._aborted.set()
            threading.Thread(target=self._group.abort, name="kv-nccl-abort", daemon=True).start()


def check_nccl(device: str) -> None:
    """Prepare NCCL for blocks on GPU ``device``. Raises ConfigError if it cannot be used."""
    if not torch.distributed.is_nccl_available():
        raise ConfigError("this torch has no NCCL: transport nccl needs a build of torch for CUDA")
    if not torch.cuda.is_available():
        raise ConfigError("transport nccl needs an NVIDIA GPU, and torch sees none")
    if not device.startswith("cuda"):
        raise ConfigError(f"transport nccl needs KV blocks on a GPU; they are on {device}")
    for name, value in _NCCL_SETTINGS.items():
        os.environ[name] = value


def check_gloo() -> None:
    """Raise ConfigError if gloo cannot be used."""
    if not torch.distributed.is_gloo_available():
        raise ConfigError("this torch has no gloo")


class StagingBuffer(Protocol):
    """Bytes that the host writes or reads, and a process group sends or receives."""

    @property
    def view(self) -> memoryview:
        """View of the buffer's bytes in host memory."""

    def tensor(self, length: int) -> torch.Tensor:
        """Return the first ``length`` bytes in the memory that the process group uses: a uint8
        tensor [length]."""

    def upload(self, length: int) -> None:
        """Copy ``length`` bytes that the host has written to the memory of ``tensor``."""

    def download(self, length: int) -> None:
        """Copy ``length`` received bytes from the memory of ``tensor`` to the host's view."""


class HostBuffer:
    """A staging buffer in host memory. The kernel provides only pages that were used."""

    def __init__(self, capacity: int) -> None:
        """``capacity`` is the size of the buffer in bytes."""
        self._bytes = torch.empty(capacity, dtype=torch.uint8)
        self.view = self._bytes.numpy().data

    def tensor(self, length: int) -> torch.Tensor:
        """Return the first ``length`` bytes of the buffer as a uint8 tensor. See
        ``StagingBuffer``."""
        return self._bytes[:length]

    def upload(self, length: int) -> None:
        """Do nothing: ``view`` and ``tensor`` are the same memory."""

    def download(self, length: int) -> None:
        """Do nothing: ``view`` and ``tensor`` are the same memory."""


class DeviceBuffer:
    """A staging buffer on a GPU, with a pinned counterpart in host memory."""

    def __init__(self, capacity: int, device: torch.device) -> None:
        """``capacity`` is the size of the buffer in bytes. The GPU and the host each have a buffer
        of this size."""
        self._host = torch.empty(capacity, dtype=torch.uint8, pin_memory=True)
        self._device = torch.empty(capacity, dtype=torch.uint8, device=device)
        # A stream of its own: the default stream would wait for the engine's kernels.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.view = self._host.numpy().data

    def tensor(self, length: int) -> torch.Tensor:
        """Return the first ``length`` bytes of the buffer as a uint8 tensor. See
        ``StagingBuffer``."""
        return self._device[:length]

    def upload(self, length: int) -> None:
        """Copy ``length`` bytes from the host to the GPU. See ``StagingBuffer``."""
        self._copy(self._device[:length], self._host[:length])

    def download(self, length: int) -> None:
        """Copy ``length`` received bytes from the GPU to the host. See ``StagingBuffer``."""
        self._copy(self._host[:length], self._device[:length])

    def _copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        with torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()
