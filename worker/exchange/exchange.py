"""All pairs of this worker with other workers: what it sends and receives.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor

import grpc.aio

from baton.errors import BatonError, GeometryMismatch
from baton.rpc import convert
from baton.rpc.grpc_errors import call_errors
from baton.rpc.worker_plane import OPEN_PLANE, WorkerPlane
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.pairs.inbound import Inbound
from kvtransfer.pairs.negotiation import Fit
from kvtransfer.pairs.outbound import Outbound
from kvtransfer.pairs.pair import Identity, PairLimits, check_peer
from kvtransfer.pairs.push_fan import BlockPush, PushFan
from kvtransfer.transports.transport import Peer, Transport
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.handoff_calls import HandoffCalls
from worker.exchange.rank_link import RankLinks
from worker.exchange.sender import OutboundPairs, RankedPeer, RankSender

Recall = Callable[[Sequence[bytes]], Awaitable[None]]
"""Function that loads the leading blocks of some hashes from an offload tier into the block pool,
if that is faster than computing them."""


class Exchange:
    """All pairs, tickets and calls between this worker and others."""

    def __init__(
        self,
        identity: Identity,
        transports: Sequence[Transport],
        receiver: BlockReceiver,
        limits: PairLimits,
        executor: Executor,
        *,
        address: str = "",
        ranks: RankLinks | None = None,
        plane: WorkerPlane = OPEN_PLANE,
        recall: Recall | None = None,
    ) -> None:
        """``transports`` have registered this worker's blocks. ``executor`` has the threads that
        read the blocks.

        ``address`` is host:port of this worker's gRPC server; empty if it receives nothing.
        ``ranks`` are open links to the worker's other ranks; None if it has only one rank.
        ``plane`` secures this worker's calls to others. ``recall`` loads blocks from the offload
        tiers, if there are any.
        """
        self.identity = identity
        self.address = address
        self.receiver = receiver
        rank_addresses = () if ranks is None else (address, *ranks.addresses)
        self.inbound = Inbound(identity, transports, receiver, limits, rank_addresses)
        receiver.subscribe(self.inbound.released)
        self._transports = transports
        self._pool = receiver.pool
        self._pairs = OutboundPairs(
            identity, transports, limits, executor, plane.channel, receiver.clock
        )
        self._sender = RankSender(identity, self._pairs)
        self._ranks = ranks
        self._recall = recall
        self._pulls_served = 0
        self._calls: dict[Outbound, HandoffCalls] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return the gRPC channel to the server of another worker. There is one channel per
        address."""
        return self._pairs.channel(address)

    async def outbound(self, peer: Peer) -> Outbound:
        """Return the open pair to a receiver, or open one if there is none. Raises BatonError."""
        return await self._pairs.outbound(peer)

    def push(self, pair: Outbound, ticket_id: str, memory: BlockMemory | None = None) -> BlockPush:
        """Start to send blocks to a receiver's ticket, from all ranks of this worker to all ranks
        of the receiver.

        ``memory`` holds the blocks to send, as in ``Outbound.push``. Raises HandoffError.
        """
        degrees = self.identity.geometry.tensor_parallel, pair.geometry.tensor_parallel
        if degrees == (1, 1):
            return pair.push(ticket_id, memory)
        own, *others = pair.rank_addresses or (pair.peer.address,)
        # Uses the address by which this worker knows the receiver, so that rank 0's open pair is
        # reused.
        addresses = (pair.peer.address or own, *others)
        receiver = RankedPeer(pair.peer.incarnation, pair.geometry, addresses)
        ways: list[BlockPush] = [self._sender.push(ticket_id, receiver)]
        if self._ranks is not None:
            ways += self._ranks.push(ticket_id, receiver)
        return PushFan(ways)

    def handoff_calls(self, pair: Outbound) -> HandoffCalls:
        """Return the handoff calls to the receiver of a pair. When the pair fails, these calls fail
        with its error."""
        calls = self._calls.get(pair)
        if calls is None:
            calls = HandoffCalls(self.channel(pair.peer.address), pair.peer.incarnation)
            self._calls[pair] = calls
            pair.broken.add_done_callback(lambda broken: self._end_calls(pair, broken.result()))
        return calls

    def _end_calls(self, pair: Outbound, error: BatonError) -> None:
        self._calls.pop(pair).end(error)

    async def serve_pull(
        self, reader: Identity, peer: Peer, meant: str, ticket_id: str, hashes: Sequence[bytes]
    ) -> int:
        """Send cached blocks of this worker to another worker's ticket: the leading blocks of
        ``hashes`` that are cached.

        Returns how many blocks have arrived. While this call runs, the blocks stay pinned. Raises
        BatonError.
        """
        if check_peer(self.identity, reader, meant) is Fit.CONVERTIBLE:
            raise GeometryMismatch(
                "blocks cannot be converted when they are pulled: "
                f"{reader.incarnation} has {reader.geometry}, "
                f"{self.identity.incarnation} has {self.identity.geometry}"
            )
        if self._recall is not None:
            await self._recall(hashes)
        blocks = self._pool.match(hashes)
        if not blocks:
            return 0
        self._pool.pin(blocks)
        self._pulls_served += 1
        try:
            await self._push_blocks(peer, ticket_id, blocks)
        finally:
            self._pulls_served -= 1
            self._pool.release(blocks)
        return len(blocks)

    async def _push_blocks(self, peer: Peer, ticket_id: str, blocks: Sequence[int]) -> None:
        pair = await self.outbound(peer)
        push = self.push(pair, ticket_id)
        try:
            for target, block in enumerate(blocks):
                push.put_layers(target, block, 0, self.identity.geometry.layers)
            push.end()
            await asyncio.shield(push.done)
        except asyncio.CancelledError:
            push.cancel()
            # This ends, because the pair notices a silent peer.
            await asyncio.wait([push.done])
            raise

    async def pull(
        self, holder: Peer, ticket_id: str, hashes: Sequence[bytes], deadline_s: float
    ) -> int:
        """Request that another worker sends blocks to a ticket of this worker: see ``serve_pull``.

        Returns how many of the leading blocks of ``hashes`` have arrived. Raises BatonError.
        """
        request = transfer_pb2.PullRequest(
            fingerprint=self.identity.fingerprint,
            geometry=convert.geometry_to_proto(self.identity.geometry),
            holder=holder.incarnation,
            reader=self.identity.incarnation,
            reader_address=self.address,
            ticket_id=ticket_id,
            block_hashes=hashes,
        )
        with self._pairs.using(holder.address) as channel:
            stub = transfer_pb2_grpc.TransferServiceStub(channel)
            with call_errors(holder.incarnation):
                response = await stub.Pull(request, timeout=deadline_s)
        return int(response.blocks)

    def is_idle(self) -> bool:
        """Whether this worker has no open ticket, and no other worker reads its blocks."""
        return not len(self.receiver.book) and not self._pulls_served

    def heartbeat(self) -> None:
        """Renew leases, fail pairs of silent peers, and end tickets that have expired."""
        now = self.receiver.clock()
        self._pairs.heartbeat(now)
        if self._ranks is not None:
            self._ranks.heartbeat(now)
        self.inbound.sweep(now)
        self.receiver.sweep(now)

    def check_ranks(self) -> None:
        """Raise WorkerFailed if another rank of this worker is gone."""
        if self._ranks is not None:
            self._ranks.check()

    def pairs(self) -> dict[str, str]:
        """The name of the transport to each receiver. The keys are the receivers' incarnations."""
        return self._pairs.transports()

    @property
    def in_flight_bytes(self) -> int:
        """Number of bytes that were announced to receivers and have not arrived yet."""
        return self._pairs.in_flight_bytes

    def staging(self) -> dict[str, int]:
        """Number of bytes in staging memory between the blocks and the network, by transport."""
        return {transport.name: transport.staging_bytes for transport in self._transports}

    async def close(self) -> None:
        """End every pair and every transport."""
        await self._pairs.end_opening()
        self.receiver.close()
        self.inbound.close()
        calls = list(self._calls.values())
        await self._pairs.close_pairs()
        for each in calls:
            await each.close()
        if self._ranks is not None:
            await self._ranks.close()
        await self._pairs.close_channels()
        for transport in self._transports:
            await asyncio.to_thread(transport.close)
