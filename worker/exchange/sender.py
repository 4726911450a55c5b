"""The sending side of one rank of this worker: its pairs, and its part of blocks for a receiver.

A failed pair is forgotten, and an unused channel is closed with the next heartbeat: a peer that
returns uses another port. Rank 0 sends its own part, and commands the other ranks to send theirs
(``worker.exchange.rank_link``). Owned by the rank's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import grpc.aio

from baton.errors import HandoffError, Unavailable, WorkerFailed
from baton.host.background import end_tasks
from baton.request import Geometry
from baton.rpc.grpc_channel import open_channel
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.reshard import shards
from kvtransfer.pairs.outbound import Outbound
from kvtransfer.pairs.pair import Identity, PairLimits
from kvtransfer.pairs.push_fan import BlockPush, LatePush, PushFan
from kvtransfer.transports.transport import Peer, Transport


class OutboundPairs:
    """The pairs in which a rank sends blocks, and the gRPC channels to its peers."""

    def __init__(
        self,
        identity: Identity,
        transports: Sequence[Transport],
        limits: PairLimits,
        executor: Executor,
        connect: Callable[[str], grpc.aio.Channel] = open_channel,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``transports`` have registered the blocks. ``executor`` has the threads that read the
        blocks.

        ``connect`` makes channels. ``clock`` measures the silence of peers, in seconds; see
        ``baton.liveness.listening``.
        """
        self._clock = clock
        self._identity = identity
        self._transports = transports
        self._limits = limits
        self._executor = executor
        self._connect = connect
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._used: Counter[str] = Counter()
        self._pairs: dict[Peer, Outbound] = {}
        self._opening: dict[Peer, asyncio.Task[Outbound]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._is_over = False

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return the gRPC channel to the server of another worker. There is one channel per
        address. Raises Unavailable after ``end_opening``."""
        if self._is_over:
            raise Unavailable("this worker is stopping", retry_after=1.0)
        if address not in self._channels:
            self._channels[address] = self._connect(address)
        return self._channels[address]

    @contextmanager
    def using(self, address: str) -> Iterator[grpc.aio.Channel]:
        """Keep the channel to ``address`` open within this context, even without a pair."""
        self._used[address] += 1
        try:
            yield self.channel(address)
        finally:
            self._used[address] -= 1

    async def outbound(self, peer: Peer) -> Outbound:
        """Return the open pair to a receiver, or open one if there is none. Raises BatonError."""
        pair = self.open_pair(peer)
        if pair is not None:
            return pair
        opening = self._opening.get(peer)
        if opening is None:
            opening = asyncio.create_task(self._open(peer), name="open-pair")
            self._opening[peer] = opening
            opening.add_done_callback(lambda done: self._opened(peer, done))
        # Other callers may wait for the same task.
        return await asyncio.shield(opening)

    def open_pair(self, peer: Peer) -> Outbound | None:
        """Return the open pair to a receiver; None if there is none."""
        pair = self._pairs.get(peer)
        return pair if pair is not None and not pair.broken.done() else None

    async def _open(self, peer: Peer) -> Outbound:
        silence_s = self._limits.silence_s
        while True:
            pair = Outbound(self._identity, peer, self._transports, self._limits, self._executor)
            began = self._clock()
            try:
                await pair.open(self.channel(peer.address), silence_s)
            except TimeoutError:
                # If this process stood still, the peer may have answered nevertheless.
                if self._clock() - began >= silence_s / 2:
                    raise WorkerFailed(
                        f"{peer.incarnation} has not answered for {silence_s} s"
                    ) from None
            else:
                return pair

    def _opened(self, peer: Peer, done: asyncio.Task[Outbound]) -> None:
        self._opening.pop(peer, None)
        if not done.cancelled() and done.exception() is None:
            self._pairs[peer] = done.result()
        else:
            self._leave(peer.address)

    def heartbeat(self, now: float) -> None:
        """Renew leases, fail pairs of silent receivers, and forget pairs that have ended.

        A channel without a pair stays open until the next heartbeat, so that successive calls share
        it.
        """
        for peer, pair in list(self._pairs.items()):
            pair.heartbeat(now)
            if pair.broken.done():
                del self._pairs[peer]
        for address in list(self._channels):
            self._leave(address)

    def _leave(self, address: str) -> None:
        """Close the channel to ``address`` if no pair and no context uses it."""
        peers = (*self._pairs, *self._opening)
        if self._used[address] or any(peer.address == address for peer in peers):
            return
        del self._used[address]
        channel = self._channels.pop(address, None)
        if channel is not None:
            closing = asyncio.create_task(channel.close(), name="close-channel")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def transports(self) -> dict[str, str]:
        """The name of the transport to each receiver. The keys are the receivers' incarnations."""
        return {
            peer.incarnation: pair.transport
            for peer, pair in self._pairs.items()
            if not pair.broken.done()
        }

    @property
    def in_flight_bytes(self) -> int:
        """Number of bytes that were announced to receivers and have not arrived yet."""
        return sum(pair.in_flight_bytes for pair in self._pairs.values())

    async def end_opening(self) -> None:
        """Open no more pairs, and cancel those that are being opened."""
        self._is_over = True
        await end_tasks(self._opening.values())

    async def close_pairs(self) -> None:
        """End every open pair."""
        for pair in list(self._pairs.values()):
            await pair.close()

    async def close_channels(self) -> None:
        """Close every channel to a peer."""
        for channel in list(self._channels.values()):
            await channel.close()
        await asyncio.gather(*self._closing)


@dataclass(frozen=True, slots=True)
class RankedPeer:
    """A receiver that may have several ranks, and the addresses of these ranks."""

    incarnation: str
    geometry: Geometry
    addresses: tuple[str, ...]
    """host:port of each rank's gRPC server."""


class RankSender:
    """Sends a rank's part of blocks to all ranks of a receiver at once."""

    def __init__(self, identity: Identity, pairs: OutboundPairs) -> None:
        self._identity = identity
        self._pairs = pairs
        self._target_ranks = lru_cache(maxsize=64)(self._find_target_ranks)

    def push(self, ticket_id: str, receiver: RankedPeer) -> PushFan:
        """Start to send this rank's part of blocks to a ticket of all the receiver's ranks.

        Raises HandoffError if the peer does not list the addresses of all its ranks.
        """
        ranks = self._target_ranks(receiver.geometry)
        if len(receiver.addresses) != receiver.geometry.tensor_parallel:
            raise HandoffError(
                f"{receiver.incarnation} has {receiver.geometry.tensor_parallel} ranks, but listed "
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
