"""What fetching cached blocks from another worker would take, and whether it pays.

A fetch takes a fixed time, and its bytes over the bandwidth from that worker, which is learned from
the fetches before. A worker from which fetches fail is left alone for a while, longer each time.

Plain Python: data and ``now`` in, data out. Times are in seconds.
"""

from __future__ import annotations

from collections import OrderedDict

from worker.offload.tier_estimates import LoadSource, load_deadline_s

FIXED_S = 0.003
"""The call, the ticket and the first message, where a pair is open."""
OPENING_S = 0.02
"""Agreeing on a transport, where none is."""
_BYTES_PER_S = {
    "shm": 4e9,
    "cuda_ipc": 5e10,
    "nccl": 1e10,
    "nixl": 2e9,
    "gloo": 2e9,
    "grpc": 1e9,
}
"""Until fetches have shown it."""
_MIN_BYTES_PER_S = 1e9
"""The same where the transport is not known yet."""
_PRIOR_BYTES = 1 << 20
"""Bytes as which the assumed bandwidth counts next to the first fetches."""
_SHARE_OF_BYTES = 0.1
"""At least this share of a fetch's time is put down to its bytes."""
_MAX_PEERS = 256


class FetchEstimates:
    """Estimates by peer. ``transport`` is that of the open pair; empty without one."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, LoadSource] = OrderedDict()

    def _peer(self, incarnation: str, transport: str) -> LoadSource:
        bandwidth = _BYTES_PER_S.get(transport, _MIN_BYTES_PER_S)
        peer = self._peers.setdefault(incarnation, LoadSource(bandwidth, _PRIOR_BYTES))
        self._peers.move_to_end(incarnation)
        while len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)
        return peer

    def fetch_s(self, incarnation: str, transport: str, size: int) -> float:
        """How long ``size`` bytes from a worker will take."""
        return _fixed_s(transport) + self._peer(incarnation, transport).load_s(size)

    def pays(
        self, incarnation: str, transport: str, size: int, compute_s: float, now: float
    ) -> bool:
        """Whether to fetch ``size`` bytes rather than to compute for ``compute_s``."""
        if self._peer(incarnation, transport).is_paused(now):
            return False
        return self.fetch_s(incarnation, transport, size) < compute_s

    def deadline_s(self, incarnation: str, transport: str, size: int, compute_s: float) -> float:
        """Seconds after which a fetch is given up that saves ``compute_s``."""
        return load_deadline_s(self.fetch_s(incarnation, transport, size), compute_s)

    def succeeded(self, incarnation: str, transport: str, size: int, seconds: float) -> None:
        """A fetch brought ``size`` bytes. ``transport`` is what it was before."""
        bytes_s = max(seconds - _fixed_s(transport), seconds * _SHARE_OF_BYTES)
        self._peer(incarnation, transport).succeeded(size, bytes_s)

    def failed(self, incarnation: str, transport: str, now: float) -> None:
        """A fetch came to nothing, or took too long."""
        self._peer(incarnation, transport).failed(now)


def _fixed_s(transport: str) -> float:
    return FIXED_S if transport else FIXED_S + OPENING_S
