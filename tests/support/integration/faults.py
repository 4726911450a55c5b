"""Shared by the tests of faults and by other tests."""

from __future__ import annotations

from kvtransfer.pairs.negotiation import TRANSPORTS
from tests.support.mini_cluster import MiniCluster
from worker.exchange.block_receiver import NO_TRANSPORT


def outcomes(cluster: MiniCluster, outcome: str) -> float:
    """Handoffs to the decode worker that ended so, by whatever transport."""
    return sum(
        cluster.value("decode-0", "baton_handoffs_total", transport=transport, outcome=outcome)
        for transport in (*TRANSPORTS, NO_TRANSPORT)
    )
