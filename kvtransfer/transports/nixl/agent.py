"""A wrapper of nixl for its transport: one agent over UCX.

nixl's own Python class makes the agent's progress thread spin on a core forever. So this uses the
bindings below it, which let that thread sleep until there is traffic.

UCX reads its settings from environment variables before the agent exists. By default none are set:
UCX then uses InfiniBand or RoCE, CUDA and shared memory if it finds them. ``UCX_NET_DEVICES``
selects network cards (``mlx5_0:1``; ``lo`` for one host), ``UCX_TLS`` the transports
(``rc,cuda,sm,self``). For TCP it listens on the address of each of those devices and on loopback,
on ports that the system chooses, and not on the wildcard address. Without ``UCX_NET_DEVICES`` this
means every interface that is up. ``data_network`` sets it (``baton.host.data_network``).

UCX authenticates and encrypts nothing. What is read is encrypted already
(``kvtransfer.transports.encryption``). But who speaks UCX's protocol may reach the memory of the
process: only workers may be in this network.
"""

from __future__ import annotations

import importlib
import logging
from typing import Any

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError, HandoffError, WorkerFailed
from baton.extras import needs_extra

log = logging.getLogger(__name__)

_PROGRESS_MICROSECONDS = 10_000
"""Maximum sleep of UCX's progress thread, in microseconds; events wake it earlier."""


class NixlAgent:
    """One nixl agent. Thread-safe."""

    def __init__(self, name: str) -> None:
        """``name`` must never have been used by another agent. Raises ConfigError if nixl or UCX is
        missing."""
        self._nixl = _load_nixl()
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_MICROSECONDS
        config.syncMode = self._nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value
        try:
            self._agent = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
        except Exception as error:
            raise ConfigError(f"transport nixl cannot start UCX: {error!r}") from error

    def register(self, address: int, length: int) -> None:
        """Allow peers to read ``length`` bytes of host memory from ``address`` on over the network.
        Raises ConfigError."""
        try:
            regions = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(address, length, 0, "")])
            self._agent.registerMem(regions)
        except Exception as error:
            raise ConfigError(f"transport nixl cannot register memory: {error!r}") from error

    def metadata(self) -> bytes:
        """Return the data with which other processes can reach this agent and read its registered
        memory."""
        return bytes(self._agent.getLocalMD())

    def load(self, metadata: bytes) -> str:
        """Add the peer that ``metadata`` describes. Returns its name. Raises HandoffError."""
        try:
            return bytes(self._agent.loadRemoteMD(metadata)).decode()
        except Exception as error:
            raise HandoffError(f"a peer's nixl metadata cannot be used: {error!r}") from error

    def forget(self, name: str) -> None:
        """Disconnect from a peer. No read from it may be in flight."""
        self._agent.invalidateRemoteMD(name)

    def begin_read(self, name: str, remote: int, local: int, length: int) -> int:
        """Read ``length`` bytes of a peer's host memory into that of this process.

        ``remote`` and ``local`` are addresses within registered memory. Returns a handle. Raises
        WorkerFailed if the peer is gone, HandoffError if it has no such memory.
        """
        here = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, _descriptor(local, length))
        there = self._nixl.nixlXferDList(self._nixl.DRAM_SEG, _descriptor(remote, length))
        try:
            handle = int(self._agent.createXferReq(self._nixl.NIXL_READ, here, there, name))
        except Exception as error:
            raise HandoffError(f"nixl cannot read from {name}: {error!r}") from error
        try:
            self._agent.postXferReq(handle)
        except Exception as error:
            self.release(handle)
            raise _gone(name, error) from error
        return handle

    def ended(self, name: str, handle: int) -> bool:
        """Whether a read has ended successfully; False while it runs. Raises WorkerFailed if the
        read has failed."""
        try:
            status = self._agent.getXferStatus(handle)
        except Exception as error:
            raise _gone(name, error) from error
        return bool(status == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Release the handle of a read. The read must have ended.

        If it still runs, it continues after the release, and its end can no longer be seen.
        """
        try:
            self._agent.releaseXferReq(handle)
        except Exception as error:
            log.warning("nixl cannot release the handle of a read: %r", error)

    def close(self) -> None:
        """End the agent, which is unusable afterwards. Registered memory may then be freed."""
        # The agent's destructor is the only way to close it.
        del self._agent


def _load_nixl() -> Any:
    with needs_extra("nixl", "transport nixl"):
        return importlib.import_module("nixl")


def _descriptor(address: int, length: int) -> npt.NDArray[Any]:
    return np.array([[address, length, 0]], dtype=np.uint64)


def _gone(name: str, error: Exception) -> WorkerFailed:
    return WorkerFailed(f"nixl has lost {name}: {error!r}")
