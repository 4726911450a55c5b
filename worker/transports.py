"""The transports that this worker can use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Executor

from baton.config import TransportName
from baton.errors import ConfigError
from kvtransfer.grpc_transport import GrpcTransport
from kvtransfer.memory import BlockMemory
from kvtransfer.shm_transport import ShmTransport
from kvtransfer.transport import Transport

log = logging.getLogger(__name__)

Maker = Callable[[], Transport]

_BY_ITSELF = {"cpu": ("shm", "grpc"), "cuda": ("cuda_ipc", "nccl", "grpc")}
"""Tried where nothing is forced, by the blocks' device. Others have their price: see
docs/handoff.md."""


def make_transports(
    wanted: TransportName, memory: BlockMemory, host: str, executor: Executor
) -> list[Transport]:
    """Registered transports: the one that is ``wanted``, or all that work with ``auto``.

    ``host`` is where servers listen, ``executor`` copies blocks. Raises ConfigError where the one
    that is wanted does not work here, and says why.
    """
    makers = _makers(host, executor)
    if wanted != "auto":
        if wanted not in makers:
            raise ConfigError(f"transport {wanted} is not part of this build of Baton")
        transport = makers[wanted]()
        transport.register(memory)
        return [transport]
    found = []
    for name in _BY_ITSELF[memory.device.partition(":")[0]]:
        if name not in makers:
            continue
        try:
            transport = makers[name]()
            transport.register(memory)
            found.append(transport)
        except ConfigError as error:
            log.info("transport %s is not used: %s", name, error.message)
    return found


def _makers(host: str, executor: Executor) -> dict[str, Maker]:
    return {
        "shm": lambda: ShmTransport(executor),
        "grpc": lambda: GrpcTransport(host),
    }
