"""The ranks of one worker, as one of them sees them: a process group of torch.distributed.

gloo between tensors in the host's memory, NCCL between GPUs; the same calls. Every call is made by
all ranks in the same order. What ``add`` returns is the same on all ranks, bit for bit, since each
number is added up once.

    formed ─an operation fails, or takes longer than the deadline→ broken (calls raise) ─→ closed
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
"""A collective operation that takes longer has failed: a rank is gone, or stands still."""
_TCP_STORE: Any = torch.distributed.TCPStore  # type: ignore[attr-defined]
_NCCL_SETTINGS = {
    # Whoever owns the group ends the process; torch's monitors would do it without a word.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Rendezvous:
    """Where the ranks find one another: a small server of rank 0, on one address alone."""

    def __init__(self, host: str, ranks: int) -> None:
        """Listens from now on, on a port that the kernel chooses."""
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
    """Used by the engine thread alone, from the engine's start on."""

    def __init__(
        self,
        store: Store,
        rank: int,
        ranks: int,
        device: torch.device,
        host: str,
        deadline_s: float = COLLECTIVE_S,
    ) -> None:
        """Blocks until all have come. ``host`` is where this rank listens.

        Raises WorkerFailed after ``deadline_s`` seconds, and ConfigError where torch lacks what
        ``device`` needs.
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
        """Another rank than 0: by way of the ``Rendezvous`` that rank 0 has at ``host``, ``port``.

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
                f"rank {self.rank} of {self.ranks}: the others cannot be reached: {error}"
            ) from error

    def _run(self, begin: Callable[[], Any]) -> None:
        with self._told():
            work = begin()
            # NCCL gives none for what it has put on the caller's stream.
            if work is not None:
                work.wait()

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks of ``x``, which is overwritten."""
        x = x.contiguous()
        options = _in_order(torch.distributed.AllreduceOptions())
        self._run(lambda: self._group.allreduce([x], options))
        return x

    def broadcast(self, x: torch.Tensor) -> None:
        """Have rank 0's ``x``, which is contiguous, everywhere."""
        options = _in_order(torch.distributed.BroadcastOptions())
        options.rootRank = 0
        self._run(lambda: self._group.broadcast([x], options))

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """On rank 0 those of all ranks, [ranks, …], in their order; elsewhere None."""
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
        """On every rank those of all ranks, [ranks, …], in their order; all of one shape."""
        x = x.contiguous()
        found = torch.empty(self.ranks, *x.shape, dtype=x.dtype, device=x.device)
        self._run(lambda: self._group.allgather([list(found)], [x]))
        return found

    def least(self, number: int) -> int:
        """The least of the numbers that the ranks give."""
        options = _in_order(torch.distributed.AllreduceOptions())
        options.reduceOp = torch.distributed.ReduceOp.MIN
        held = torch.tensor([number], dtype=torch.int64, device=self._device)
        self._run(lambda: self._group.allreduce([held], options))
        return int(held.item())


def _in_order(options: Any) -> Any:
    """Options by which NCCL works on the caller's stream, where this torch can (2.8 and later).

    Otherwise it takes a stream of its own and two events for each call.
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

    gloo: Any = ProcessGroupGloo  # torch's stubs say less than there is
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
