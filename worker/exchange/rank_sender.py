"""What one rank of a writer sends to the ranks of its receivers, all of them at once.

Rank 0 has one for itself, and tells the other ranks what theirs are to do
(``worker.exchange.rank_link``). Owned by the control loop of the rank.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import lru_cache

from baton.errors import HandoffError
from baton.request import Geometry
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.reshard import shards
from kvtransfer.pairs.pair import Identity
from kvtransfer.pairs.push_fan import BlockPush, LatePush, PushFan
from kvtransfer.transports.transport import Peer
from worker.exchange.outbound_pairs import OutboundPairs


@dataclass(frozen=True, slots=True)
class RankedPeer:
    """A receiver and where its ranks are reached."""

    incarnation: str
    geometry: Geometry
    addresses: tuple[str, ...]
    """host:port of the gRPC server of each rank."""


class RankSender:
    """See the module's text."""

    def __init__(self, identity: Identity, pairs: OutboundPairs) -> None:
        self._identity = identity
        self._pairs = pairs
        self._target_ranks = lru_cache(maxsize=64)(self._find_target_ranks)

    def push(self, ticket_id: str, receiver: RankedPeer) -> PushFan:
        """Begin to send blocks of this rank to a ticket. Raises HandoffError for a peer without

        the ranks that it should have.
        """
        ranks = self._target_ranks(receiver.geometry)
        if len(receiver.addresses) != receiver.geometry.tensor_parallel:
            raise HandoffError(
                f"{receiver.incarnation} has {receiver.geometry.tensor_parallel} ranks, and named "
                f"{len(receiver.addresses)} addresses"
            )
        peers = [Peer(receiver.incarnation, receiver.addresses[rank], rank) for rank in ranks]
        return PushFan([self._way(ticket_id, peer) for peer in peers])

    def _find_target_ranks(self, geometry: Geometry) -> tuple[int, ...]:
        source, target = KvLayout.of(self._identity.geometry), KvLayout.of(geometry)
        found = shards(source, target)
        own = self._identity.rank
        return tuple(shard.target_rank for shard in found if shard.source_rank == own)

    def _way(self, ticket_id: str, peer: Peer) -> BlockPush:
        pair = self._pairs.open_pair(peer)
        if pair is not None:
            return pair.push(ticket_id)
        return LatePush(
            asyncio.create_task(self._pairs.outbound(peer), name="late-push"), ticket_id
        )
