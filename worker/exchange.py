"""All pairs of this worker with others: what it sends, and what it receives.

Owned by the control loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from typing import Protocol

import grpc.aio

from baton import convert
from baton.background import end_tasks
from baton.errors import BatonError, GeometryMismatch, WorkerFailed
from baton.grpc_channel import open_channel
from baton.grpc_errors import error_from_rpc
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from kvtransfer.inbound import Inbound
from kvtransfer.negotiation import Fit
from kvtransfer.outbound import Outbound
from kvtransfer.pair import Identity, PairLimits, check_peer
from kvtransfer.transport import Peer, Transport
from worker.block_receiver import BlockReceiver
from worker.handoff_calls import HandoffCalls


class Behind(Protocol):
    """What is behind the block pool: see ``worker.tier_loader``."""

    async def recall(self, hashes: Sequence[bytes]) -> None:
        """Have the leading blocks of these hashes in the pool, where that pays."""


class Exchange:
    """See the module's text."""

    def __init__(
        self,
        identity: Identity,
        transports: Sequence[Transport],
        receiver: BlockReceiver,
        limits: PairLimits,
        executor: Executor,
    ) -> None:
        """``transports`` are registered; ``executor`` reads blocks."""
        self.identity = identity
        self.address = ""
        """host:port of this worker's gRPC server; set once it listens."""
        self.receiver = receiver
        self.inbound = Inbound(identity, transports, receiver, limits)
        receiver.listeners.append(self.inbound)
        self._transports = transports
        self._limits = limits
        self._executor = executor
        self._pool = receiver.pool
        self._block_bytes = receiver.block_bytes
        self.behind: Behind | None = None
        self._given = 0
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._outbound: dict[Peer, Outbound] = {}
        self._opening: dict[Peer, asyncio.Task[Outbound]] = {}
        self._calls: dict[Outbound, HandoffCalls] = {}

    def channel(self, address: str) -> grpc.aio.Channel:
        """The one channel to a worker's gRPC server."""
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    async def outbound(self, peer: Peer) -> Outbound:
        """The open pair to a receiver; opened where there is none. Raises BatonError."""
        pair = self._outbound.get(peer)
        if pair is not None and not pair.broken.done():
            return pair
        opening = self._opening.get(peer)
        if opening is None:
            opening = asyncio.create_task(self._open(peer), name="open-pair")
            self._opening[peer] = opening
            opening.add_done_callback(lambda done: self._opened(peer, done))
        # Others may wait for the same one.
        return await asyncio.shield(opening)

    async def _open(self, peer: Peer) -> Outbound:
        pair = Outbound(self.identity, peer, self._transports, self._limits, self._executor)
        try:
            await pair.open(self.channel(peer.address), self._limits.silence_s)
        except TimeoutError:
            raise WorkerFailed(
                f"{peer.incarnation} has not answered for {self._limits.silence_s} s"
            ) from None
        return pair

    def _opened(self, peer: Peer, done: asyncio.Task[Outbound]) -> None:
        self._opening.pop(peer, None)
        if not done.cancelled() and done.exception() is None:
            self._outbound[peer] = done.result()

    def handoff_calls(self, pair: Outbound) -> HandoffCalls:
        """The calls that go with a pair: they end when it breaks, with its error."""
        calls = self._calls.get(pair)
        if calls is None:
            calls = HandoffCalls(self.channel(pair.peer.address), pair.peer.incarnation)
            self._calls[pair] = calls
            pair.broken.add_done_callback(lambda broken: self._end_calls(pair, broken.result()))
        return calls

    def _end_calls(self, pair: Outbound, error: BatonError) -> None:
        self._calls.pop(pair).end(error)

    async def give(
        self, reader: Identity, peer: Peer, meant: str, ticket_id: str, hashes: Sequence[bytes]
    ) -> int:
        """Send another worker, for its own ticket, the leading blocks of ``hashes`` held here.

        Returns how many have landed. They are pinned as long as this call runs: it is the read
        ticket of whoever pulls. Raises BatonError.
        """
        if check_peer(self.identity, reader, meant) is not Fit.EQUAL:
            raise GeometryMismatch(
                "blocks are pulled as they are: "
                f"{reader.incarnation} has {reader.geometry}, "
                f"{self.identity.incarnation} has {self.identity.geometry}"
            )
        if self.behind is not None:
            await self.behind.recall(hashes)
        blocks = self._pool.match(hashes)
        if not blocks:
            return 0
        self._pool.pin(blocks)
        self._given += 1
        try:
            await self._give(peer, ticket_id, blocks)
        finally:
            self._given -= 1
            self._pool.release(blocks)
        return len(blocks)

    async def _give(self, peer: Peer, ticket_id: str, blocks: Sequence[int]) -> None:
        pair = await self.outbound(peer)
        push = pair.push(ticket_id)
        try:
            for target, block in enumerate(blocks):
                push.put(target, block, 0, self._block_bytes)
            push.end()
            await asyncio.shield(push.done)
        except asyncio.CancelledError:
            push.cancel()
            # The pair notices a silent peer: this ends.
            await asyncio.wait([push.done])
            raise

    async def ask(
        self, holder: Peer, ticket_id: str, hashes: Sequence[bytes], deadline_s: float
    ) -> int:
        """Have another worker send, for a ticket of this one, what it holds: see ``give``.

        Returns how many of the leading blocks of ``hashes`` have landed. Raises BatonError.
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
        stub = transfer_pb2_grpc.TransferServiceStub(self.channel(holder.address))
        try:
            response = await stub.Pull(request, timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, holder.incarnation) from error
        return int(response.blocks)

    def is_idle(self) -> bool:
        """Whether no block is promised here, nor read for others."""
        return not len(self.receiver.book) and not self._given

    def heartbeat(self) -> None:
        """Renew leases, give up silent peers, end what has expired."""
        now = time.monotonic()
        for peer, pair in list(self._outbound.items()):
            pair.heartbeat(now)
            if pair.broken.done():
                del self._outbound[peer]
        self.inbound.sweep(now)
        self.receiver.sweep(now)

    def pairs(self) -> dict[str, str]:
        """The transport by which this worker sends to each receiver, by its incarnation."""
        return {
            peer.incarnation: pair.transport
            for peer, pair in self._outbound.items()
            if not pair.broken.done()
        }

    @property
    def in_flight_bytes(self) -> int:
        """Bytes announced to receivers that have not landed."""
        return sum(pair.in_flight_bytes for pair in self._outbound.values())

    def staging(self) -> dict[str, int]:
        """Bytes between blocks and wire, by transport."""
        return {transport.name: transport.staging_bytes for transport in self._transports}

    async def close(self) -> None:
        """End every pair and transport."""
        await end_tasks(self._opening.values())
        self.receiver.close()
        self.inbound.close()
        calls = list(self._calls.values())
        for pair in list(self._outbound.values()):
            await pair.close()
        for each in calls:
            await each.close()
        for channel in self._channels.values():
            await channel.close()
        for transport in self._transports:
            await asyncio.to_thread(transport.close)
