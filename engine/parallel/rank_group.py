"""The ranks of one worker: a process group of torch.distributed.

It uses gloo for tensors in host memory and NCCL between GPUs, with the same calls. All ranks make
every call in the same order. A sum over the ranks is the same on all of them, bit for bit, since
each number is summed only once.

formed ─an operation fails, or exceeds the deadline→ broken (calls raise) ─→ closed
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch.distributed.distributed_c10d import Store

from baton.errors import ConfigError, WorkerFailed

COLLECTIVE_S = 30.0
"""Timeout of a collective operation, in seconds. An operation that takes longer has failed, because
a rank is gone or does not respond."""
_TCP_STORE: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
_NCCL_SETTINGS = {
    # The group's owner ends the process; torch's monitors would do it without a message.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Rendezvous:
    """A small server on rank 0, through which the ranks of a worker find one another, on a single
    address."""

    def __init__(self, host: str, ranks: int) -> None:
        """Start to listen on ``host``, on a port that the kernel chooses."""
        with socket.create_server((host, 0)) as server:
            self.port: int = server.getsockname()[1]
            self.store: Store = _TCP_STORE(
                host,
                self.port,
                ranks,
                is_master=True,
                timeout=timedelta(seconds=COLLECTIVE_S),
                wait_for_workers=False,
                master_listen_fd=os.dup(server.fileno()),
            )


class RankGroup:
    """Collective operations (sum, broadcast, gather) among the ranks of a worker. Used by the
    engine thread."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        device: torch.device,
        host: str,
        deadline_s: float = COLLECTIVE_S,
    ) -> None:
        """Wait until all ranks have joined the group. ``host`` is the address on which this rank
        listens.

        Raises WorkerFailed after ``deadline_s`` seconds, and ConfigError if torch lacks the backend
        of ``device``.
        """
        self.rank, self.ranks = rank, ranks
        self._device = device
        with self._told():
            form = _nccl if device.type == "cuda" else _gloo
            self._group = form(store, rank, ranks, device, host, timedelta(seconds=deadline_s))
            self.least(0)

    @classmethod
    def join(
        cls, host: str, port: int, rank: int, ranks: int, device: torch.device, own_host: str
    ) -> RankGroup:
        """Join a worker's group as a rank other than 0, through rank 0's ``Rendezvous`` at ``host``
        and ``port``.

        Raises WorkerFailed.
        """
        try:
            store: Store = _TCP_STORE(
                host, port, ranks, is_master=False, timeout=timedelta(seconds=COLLECTIVE_S)
            )
        except RuntimeError as error:
            raise WorkerFailed(f"rank {rank} of {ranks} cannot reach rank 0: {error}") from error
        return cls(store, rank, ranks, device, own_host)

    @contextlib.contextmanager
    def _told(self) -> Any:
        try:
            yield
        except RuntimeError as error:
            raise WorkerFailed(
                f"rank {self.rank} of {self.ranks}: the other ranks cannot be reached: {error}"
            ) from error

    def _run(self, begin: Callable[[], Any]) -> None:
        with self._told():
            work = begin()
            # NCCL returns None for work on the caller's stream.
            if work is not None:
                work.wait()

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over all ranks. Every rank gets the result; ``x`` is overwritten."""
        x = x.contiguous()
        options = _in_order(torch.distributed.AllreduceOptions())
        self._run(lambda: self._group.allreduce([x], options))
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        """Copy rank 0's ``x`` into the ``x`` of all other ranks; it must be contiguous."""
        options = _in_order(torch.distributed.BroadcastOptions())
        options.rootRank = 0
        self._run(lambda: self._group.broadcast([x], options))

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """Collect ``x`` of all ranks on rank 0: [ranks, …] in order of rank. Returns None on other
        ranks."""
        options = _in_order(torch.distributed.GatherOptions())
        options.rootRank = 0
        x = x.contiguous()
        if self.rank:
            self._run(lambda: self._group.gather([], [x], options))
            return None
        found = torch.empty(self.ranks, *x.shape, dtype=x.dtype, device=x.device)
        self._run(lambda: self._group.gather([list(found)], [x], options))
        return found

    def gather_everywhere(self, x: torch.Tensor) -> torch.Tensor:
        """Collect ``x`` of all ranks on every rank: [ranks, …] in order of rank. All must have the
        same shape."""
        x = x.contiguous()
        found = torch.empty(self.ranks, *x.shape, dtype=x.dtype, device=x.device)
        self._run(lambda: self._group.allgather([list(found)], [x]))
        return found

    def least(self, number: int) -> int:
        """Return the smallest of the numbers that the ranks pass."""
        options = _in_order(torch.distributed.AllreduceOptions())
        options.reduceOp = torch.distributed.ReduceOp.MIN
        held = torch.tensor([number], dtype=torch.int64, device=self._device)
        self._run(lambda: self._group.allreduce([held], options))
        return int(held.item())


def _in_order(options: Any) -> Any:
    """Make NCCL use the caller's CUDA stream, if this torch supports it (2.8 and later).

    Otherwise NCCL uses its own stream and two events for each call.
    """
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _gloo(
    store: Store,
    rank: int,
    ranks: int,
    device: torch.device,
    host: str,
    deadline: timedelta,
) -> Any:
    from torch.distributed.distributed_c10d import ProcessGroupGloo  # noqa: PLC0415

    gloo: Any = ProcessGroupGloo  # torch's stubs lack parts of it
    options = gloo._Options()
    options._timeout = deadline
    options._threads = 1
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, ranks, options)


def _nccl(
    store: Store,
    rank: int,
    ranks: int,
    device: torch.device,
    host: str,
    deadline: timedelta,
) -> Any:
    if not torch.distributed.is_nccl_available():
        raise ConfigError("this torch has no NCCL, which tp needs on GPUs")
    from torch.distributed.distributed_c10d import ProcessGroupNCCL  # noqa: PLC0415

    os.environ.update(_NCCL_SETTINGS)
    torch.cuda.set_device(device)
    nccl: Any = ProcessGroupNCCL
    options = nccl.Options()
    options._timeout = deadline
    return nccl(store, rank, ranks, options)
