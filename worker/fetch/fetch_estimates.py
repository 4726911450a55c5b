"""What fetching cached blocks from another worker would take, and whether it pays.

A fetch takes a fixed time, and its bytes over the bandwidth from that worker, which is learned from
the fetches before. A worker from which fetches fail is left alone for a while, longer each time.

Plain Python: data and ``now`` in, data out. Times are in seconds.
"""

from __future__ import annotations

from collections import OrderedDict

from worker.costs.unit_cost import UnitCost

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
"""How much that counts beside the first fetches."""
_SHARE_OF_BYTES = 0.1
"""At least this share of a fetch's time is put down to its bytes."""
_DEADLINE_FACTOR = 4.0
_SHORTEST_DEADLINE_S = 0.5
"""Less would end fetches because a machine was busy for a moment."""
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0
_MAX_PEERS = 256


class _Peer:
    """What is known of one worker."""

    def __init__(self, transport: str) -> None:
        bandwidth = _BYTES_PER_S.get(transport, _MIN_BYTES_PER_S)
        self.pace = UnitCost(1 / bandwidth, _PRIOR_BYTES)
        self.failures = 0
        self.paused_until = float("-inf")


class FetchEstimates:
    """See the module's text. ``transport`` is that of the open pair, empty where there is none."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def _peer(self, incarnation: str, transport: str) -> _Peer:
        peer = self._peers.setdefault(incarnation, _Peer(transport))
        self._peers.move_to_end(incarnation)
        while len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)
        return peer

    def fetch_s(self, incarnation: str, transport: str, size: int) -> float:
        """How long ``size`` bytes from a worker will take."""
        pace = self._peer(incarnation, transport).pace
        return _fixed_s(transport) + size * pace.unit_s

    def pays(
        self, incarnation: str, transport: str, size: int, compute_s: float, now: float
    ) -> bool:
        """Whether to fetch ``size`` bytes rather than to compute for ``compute_s``."""
        if now < self._peer(incarnation, transport).paused_until:
            return False
        return self.fetch_s(incarnation, transport, size) < compute_s

    def deadline_s(self, incarnation: str, transport: str, size: int, compute_s: float) -> float:
        """When to give a fetch up that saves ``compute_s``.

        After a few times what it should take, but not after what it saves would have been computed.
        """
        longest = min(_DEADLINE_FACTOR * self.fetch_s(incarnation, transport, size), compute_s)
        return max(_SHORTEST_DEADLINE_S, longest)

    def succeeded(self, incarnation: str, transport: str, size: int, seconds: float) -> None:
        """A fetch brought ``size`` bytes. ``transport`` is what it was before."""
        peer = self._peer(incarnation, transport)
        peer.failures = 0
        peer.pace.observe(size, max(seconds - _fixed_s(transport), seconds * _SHARE_OF_BYTES))

    def failed(self, incarnation: str, transport: str, now: float) -> None:
        """A fetch came to nothing, or took too long."""
        peer = self._peer(incarnation, transport)
        pause = min(_FIRST_PAUSE_S * 2.0 ** min(peer.failures, 30), _LONGEST_PAUSE_S)
        peer.failures += 1
        peer.paused_until = now + pause


def _fixed_s(transport: str) -> float:
    return FIXED_S if transport else FIXED_S + OPENING_S
