"""Predicts how long a fetch of cached blocks takes, and whether it is faster than computing them.

A fetch takes a fixed time, plus its bytes divided by the bandwidth from that worker. The bandwidth
is learned from earlier fetches. After a failed fetch, a worker is not used for a while, which gets
longer with each failure.

Plain Python: data and ``now`` in, data out. Times are in seconds.
"""

from __future__ import annotations

from collections import OrderedDict

from worker.offload.tier_estimates import LoadSource, load_deadline_s

FIXED_S = 0.003
"""Fixed seconds of a fetch from another worker through an open pair: the call, the ticket and the
first message."""
OPENING_S = 0.02
"""Additional seconds of a fetch if no pair is open, because the two workers must agree on a
transport first."""
_BYTES_PER_S = {
    "shm": 4e9,
    "cuda_ipc": 5e10,
    "nccl": 1e10,
    "nixl": 2e9,
    "gloo": 2e9,
    "grpc": 1e9,
}
"""Assumed bytes per second of each transport until fetches are measured."""
_MIN_BYTES_PER_S = 1e9
"""Assumed bytes per second of a fetch whose transport is not known yet."""
_PRIOR_BYTES = 1 << 20
"""Weight of the assumed bandwidth against the first fetches, in bytes."""
_SHARE_OF_BYTES = 0.1
"""Minimum share of a fetch's duration that counts as transfer of its bytes when the bandwidth is
learned."""
_MAX_PEERS = 256


class FetchEstimates:
    """Predicts how long fetches from each other worker take.

    ``transport`` is the name of the open pair's transport; it is empty if no pair is open.
    """

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
        """Predict the seconds to fetch ``size`` bytes from the worker ``incarnation``."""
        return _fixed_s(transport) + self._peer(incarnation, transport).load_s(size)

    def pays(
        self, incarnation: str, transport: str, size: int, compute_s: float, now: float
    ) -> bool:
        """Whether fetching ``size`` bytes is predicted to be faster than computing, which takes
        ``compute_s`` seconds."""
        if self._peer(incarnation, transport).is_paused(now):
            return False
        return self.fetch_s(incarnation, transport, size) < compute_s

    def deadline_s(self, incarnation: str, transport: str, size: int, compute_s: float) -> float:
        """Return the seconds after which to give up a fetch of ``size`` bytes. Computing the same
        blocks takes ``compute_s`` seconds."""
        return load_deadline_s(self.fetch_s(incarnation, transport, size), compute_s)

    def succeeded(self, incarnation: str, transport: str, size: int, seconds: float) -> None:
        """Record that a fetch of ``size`` bytes took ``seconds``.

        ``transport`` is the name that was passed for the prediction: empty if no pair was open
        before the fetch.
        """
        bytes_s = max(seconds - _fixed_s(transport), seconds * _SHARE_OF_BYTES)
        self._peer(incarnation, transport).succeeded(size, bytes_s)

    def failed(self, incarnation: str, transport: str, now: float) -> None:
        """Record that a fetch failed or took too long."""
        self._peer(incarnation, transport).failed(now)


def _fixed_s(transport: str) -> float:
    return FIXED_S if transport else FIXED_S + OPENING_S
