"""The transports that this worker can use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor

from baton.config import TransportName
from baton.errors import ConfigError
from kvtransfer.cuda_ipc_transport import CudaIpcTransport
from kvtransfer.group_transport import GroupTransport
from kvtransfer.grpc_transport import GrpcTransport
from kvtransfer.memory import BlockMemory
from kvtransfer.nixl_transport import NixlTransport
from kvtransfer.shm_transport import ShmTransport
from kvtransfer.transport import Transport

log = logging.getLogger(__name__)

Maker = Callable[[], Transport]

_BY_ITSELF = {"cpu": ("shm", "grpc"), "cuda": ("cuda_ipc", "grpc")}
"""Tried where nothing is wanted, by the blocks' device. The others listen without knowing who comes,
or need what a machine may lack: they are for those who ask for them. See docs/handoff.md."""


def make_transports(
    wanted: TransportName, memory: BlockMemory, incarnation: str, host: str, executor: Executor
) -> list[Transport]:
    """Registered transports: the one that is ``wanted``, or all that work with ``auto``.

    ``host`` is where servers listen, ``executor`` copies blocks. Raises ConfigError where the one
    that is wanted does not work here, and says why.
    """
    makers = _makers(incarnation, host, executor)
    if wanted != "auto":
        transport = makers[wanted]()
        transport.register(memory)
        return [transport]
    found = []
    for name in _BY_ITSELF[memory.device.partition(":")[0]]:
        try:
            transport = makers[name]()
            transport.register(memory)
            found.append(transport)
        except ConfigError as error:
            log.info("transport %s is not used: %s", name, error.message)
    return found


def _makers(incarnation: str, host: str, executor: Executor) -> dict[str, Maker]:
    return {
        "cuda_ipc": lambda: CudaIpcTransport(executor),
        "shm": lambda: ShmTransport(executor),
        "nixl": lambda: NixlTransport(incarnation),
        "nccl": lambda: GroupTransport("nccl", host),
        "grpc": lambda: GrpcTransport(host),
        "gloo": lambda: GroupTransport("gloo", host),
    }
