"""The transports that this worker can use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from concurrent.futures import Executor

from baton.config.choices import MIB
from baton.config.cluster import Config
from baton.errors import ConfigError
from baton.host.data_network import find_address
from baton.security.tls import TlsFiles
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.cuda_ipc_transport import CudaIpcTransport
from kvtransfer.transports.grpc_transport import GrpcTransport
from kvtransfer.transports.nixl.transport import NixlTransport
from kvtransfer.transports.process_group.transport import GroupTransport
from kvtransfer.transports.shm_transport import ShmTransport
from kvtransfer.transports.transport import Transport

log = logging.getLogger(__name__)

Maker = Callable[[], Transport]

_BY_ITSELF = {"cpu": ("shm", "grpc"), "cuda": ("cuda_ipc", "grpc")}
"""Transports that ``auto`` tries, by the device of the blocks.

The others must be configured: they accept connections from unknown hosts, or need what a machine
may lack. See docs/explanation/handoff.md.
"""


_NIXL_PAIRS = 4
"""NIXL's staging memory, which all pairs share, has room for this many pairs whose reads do not end
because their writers are stopped."""


def make_transports(
    config: Config, memory: BlockMemory, incarnation: str, host: str, executor: Executor
) -> list[Transport]:
    """Make the transports of this worker, and register them: the one that ``config`` names, or with
    ``auto`` all that work here.

    ``host`` is the address on which servers listen, and ``executor`` copies blocks. Raises
    ConfigError, with the reason, if the named transport does not work here.
    """
    tls = config.tls.of("worker")
    data_host = host
    if config.data_network:
        place = find_address(config.data_network)
        data_host = place.address
        for name, value in place.variables.items():
            # What the operator has set is more specific, such as several network cards.
            os.environ.setdefault(name, value)
        log.info("KV blocks travel on %s, address %s", place.interface, place.address)
    makers = _makers(
        incarnation,
        host,
        executor,
        config.advanced.transfer_window_mib * MIB,
        tls,
        between_gpus=config.transport == "cuda_ipc",
        shm_folder=config.shm_folder,
        data_host=data_host,
    )
    if config.transport != "auto":
        transport = makers[config.transport]()
        transport.register(memory)
        return [transport]
    found: list[Transport] = []
    refused: dict[str, str] = {}
    for name in _BY_ITSELF[memory.device.partition(":")[0]]:
        try:
            transport = makers[name]()
            transport.register(memory)
            found.append(transport)
        except ConfigError as error:
            refused[name] = error.message
    taken = ", ".join(transport.name for transport in found) or "none"
    for name, reason in refused.items():
        log.warning("transport auto uses %s instead of %s: %s", taken, name, reason)
    return found


def _makers(
    incarnation: str,
    host: str,
    executor: Executor,
    staging: int,
    tls: TlsFiles | None = None,
    *,
    between_gpus: bool = False,
    shm_folder: str = "",
    data_host: str = "",
) -> dict[str, Maker]:
    """Return the functions that make the transports, by transport name.

    ``data_host`` is the address in the data network, if there is one. ``staging`` is the maximum
    number of bytes of staging memory that one pair uses.
    """
    return {
        "cuda_ipc": lambda: CudaIpcTransport(executor, between_gpus=between_gpus),
        "shm": lambda: ShmTransport(executor, shm_folder),
        "nixl": lambda: NixlTransport(incarnation, _NIXL_PAIRS * staging),
        "nccl": lambda: GroupTransport("nccl", data_host or host, staging),
        "grpc": lambda: GrpcTransport(host, tls),
        "gloo": lambda: GroupTransport("gloo", data_host or host, staging),
    }
