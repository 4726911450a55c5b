"""The writer's end of a pair.

    opening ─both have agreed on a transport→ open
    opening, open ─refused, stream fails, receiver silent, transport failed, close→ broken

A broken pair stays broken: code that needs its receiver opens another pair. Pushes of a broken pair
fail with its error. Owned by the event loop; transfer threads read the blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import grpc.aio

from baton.errors import BatonError, HandoffError, TicketEnded, WorkerFailed
from baton.host.background import end_tasks
from baton.rpc import convert
from baton.rpc.grpc_errors import error_from_code, stream_ending, stream_errors
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.shard_layout import ShardLayout
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.memory.seal_board import Seal, SealBoard
from kvtransfer.pairs.negotiation import Fit, check_geometry
from kvtransfer.pairs.pair import Identity, PairLimits, all_at_once, seal_checksums, shard_between
from kvtransfer.pairs.push_schedule import Bandwidth, PushBatch, PushQueue
from kvtransfer.transports.in_place import ReadSendLink
from kvtransfer.transports.staging import Region
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import Packed, Parts, Peer, SendLink, Transport, connect_shard

log = logging.getLogger(__name__)

Request = transfer_pb2.TransferRequest
Call = grpc.aio.StreamStreamCall[transfer_pb2.TransferRequest, transfer_pb2.TransferResponse]


_Read = tuple[Packed, bool]
"""A batch that was read, and whether its checksums were published."""
_FIRST_GUESS = 1e9
"""Bandwidth, in bytes per second, that is assumed for a pair until it has sent bytes."""


class Push:
    """Sends the blocks of one ticket to its receiver.

    ``done`` is a future. It gets the number of bytes that have arrived, or the error.
    """

    def __init__(
        self, outbound: Outbound, ticket_id: str, memory: BlockMemory | None = None
    ) -> None:
        """``memory`` holds the blocks to send. None means the worker's own blocks."""
        self.ticket_id = ticket_id
        self.memory = memory
        self.done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._outbound = outbound
        self._bytes = 0
        self._in_flight = 0
        self._queued = 0
        self._ended = False
        self._error: BatonError | None = None

    def put_layers(self, target: int, source: int, first: int, last: int) -> None:
        """Send the layers ``first`` … ``last - 1`` of block ``source``, whose KV must be complete;
        see ``put``.

        In a pair of ranks, only the heads that both ranks have are sent.
        """
        for offset, length in self._outbound.runs(target, first, last):
            self.put(target, source, offset, length)

    def put(self, target: int, source: int, offset: int, length: int) -> None:
        """Send part of block ``source`` to the ticket's missing block ``target``. The part must be
        complete.

        Offset and length are in bytes. Has no effect once the push has failed or was cancelled.
        """
        if self._error is None and not self._ended:
            self._queued += length
            self._outbound.put(self.ticket_id, target, source, offset, length)

    def end(self) -> None:
        """Declare that the ticket's blocks have no more parts to send."""
        self._ended = True
        self._settle()

    def cancel(self) -> None:
        """Stop sending the ticket's blocks. ``done`` fails as soon as no thread reads the blocks;
        idempotent."""
        self.fail(TicketEnded(f"ticket {self.ticket_id} was given up by its writer"))

    @property
    def is_open(self) -> bool:
        """Whether the push is still in progress: it has neither failed nor completed."""
        return self._error is None and not self.done.done()

    @property
    def is_under_way(self) -> bool:
        """Whether some of the push's parts are queued or in flight."""
        return bool(self._queued or self._in_flight)

    def fail(self, error: BatonError) -> None:
        """Fail the push with ``error``. Later errors are ignored."""
        if self.is_open:
            self._error = error
            self._outbound.drop(self.ticket_id)
            self._queued = 0
            self._settle()

    def broke(self, error: BatonError) -> None:
        """Fail the push because its pair is broken. Nothing of the push is in flight then."""
        self._in_flight = 0
        self.fail(error)
        self._settle()

    def announced(self, count: int) -> None:
        """Record that a batch of ``count`` bytes of this push is in flight."""
        self._queued = max(0, self._queued - count)
        self._in_flight += count

    def landed(self, count: int) -> None:
        """Record that a batch of ``count`` bytes of this push is no longer in flight."""
        self._in_flight -= count
        self._bytes += count
        self._settle()

    def _settle(self) -> None:
        if self.done.done() or self._in_flight:
            return
        if self._error is not None:
            self.done.set_exception(self._error)
            self.done.exception()  # retrieved, so that asyncio does not log it
            self._outbound.forget(self)
        elif self._ended and not self._queued:
            self.done.set_result(self._bytes)
            self._outbound.forget(self)


class Outbound:
    """The writer's end of a pair: announces and sends batches to one receiver."""

    def __init__(
        self,
        identity: Identity,
        peer: Peer,
        transports: Sequence[Transport],
        limits: PairLimits,
        executor: Executor,
    ) -> None:
        """``transports`` have registered this worker's blocks; ``executor`` reads them."""
        self.peer = peer
        self.transport = ""
        self.geometry = identity.geometry
        """The receiver's geometry. The blocks that are sent must be in this geometry."""
        self.fit = Fit.EQUAL
        """How the geometry of the worker's own blocks compares with the receiver's; valid once the
        pair is open."""
        self.rank_addresses: tuple[str, ...] = ()
        """host:port of the gRPC server of each of the receiver's ranks, if it has several."""
        self.in_flight_bytes = 0
        """Number of this pair's bytes that were announced to the receiver and have not arrived."""
        self.bandwidth = Bandwidth(_FIRST_GUESS)
        self.broken: asyncio.Future[BatonError] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._identity = identity
        self._transports = {transport.name: transport for transport in transports}
        self._limits = limits
        self._executor = executor
        self._shard: ShardLayout | None = None
        self._layout = KvLayout.of(self.geometry)
        self._whole_block: list[tuple[int, int]] = []
        """The (offset, bytes) pair that covers a whole block, in a list; used if the pair has no
        shard."""
        self._call: Call | None = None
        self._link: SendLink | None = None
        self._reads_in_place = False
        self._board: SealBoard | None = None
        self._seals: dict[int, Seal] = {}
        """Where the checksums of batches in flight are published, by batch number."""
        self._publishing: dict[int, asyncio.Future[_Read]] = {}
        """The readings that publish them."""
        self._regions: dict[int, Region] = {}
        """Where the receiver reads batches in flight, by batch number, if it does."""
        self._queue = PushQueue(1, 1)
        self._window_bytes = 0
        self._pushes: dict[str, Push] = {}
        self._in_flight: dict[int, PushBatch] = {}
        self._next = 0
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._reads: asyncio.Queue[tuple[int, PushBatch, asyncio.Future[_Read]]] = asyncio.Queue(1)
        """Batches whose blocks are being read, in order. The batch that is sent next is no longer
        in this queue."""
        self._reading: set[asyncio.Future[_Read]] = set()
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._users = 0
        self._owed_since: float | None = None
        self._oldest: int | None = None
        self._oldest_since = 0.0

    # Opening and closing

    async def open(self, channel: grpc.aio.Channel, deadline_s: float) -> None:
        """Agree with the receiver on a transport. Raises the receiver's refusal, WorkerFailed, or
        TimeoutError."""
        hello = transfer_pb2.OpenPair(
            fingerprint=self._identity.fingerprint,
            geometry=convert.geometry_to_proto(self._identity.geometry),
            writer=self._identity.incarnation,
            receiver=self.peer.incarnation,
            writer_rank=self._identity.rank,
            receiver_rank=self.peer.rank,
            offers=[
                transfer_pb2.TransportOffer(transport=name, offer=transport.offer())
                for name, transport in self._transports.items()
            ],
        )
        call = transfer_pb2_grpc.TransferServiceStub(channel).Transfer()
        self._call = call
        try:
            async with asyncio.timeout(deadline_s):
                await self._write(Request(open=hello))
                answer = await self._next_answer()
            opened = answer.opened
            transport = self._transports.get(opened.transport)
            if transport is None:
                raise HandoffError(f"{self.peer.incarnation} chose {opened.transport!r}")
            self.geometry = convert.geometry_from_proto(opened.geometry)
            self._layout = KvLayout.of(self.geometry)
            self._check_fit(transport)
            self._shard = self._shard_with(self.peer)
            if self._shard is None:
                self._whole_block = [(0, self._layout.block_bytes)]
            self._link = connect_shard(transport, self.peer, opened.answer, self._shard)
            self.rank_addresses = tuple(opened.rank_addresses)
        except BaseException as error:
            call.cancel()
            failure = error if isinstance(error, BatonError) else None
            self._break(
                failure or WorkerFailed(f"opening a pair with {self.peer.incarnation} failed")
            )
            raise
        self.transport = opened.transport
        self._reads_in_place = transport.reads_in_place
        if isinstance(self._link, ReadSendLink):
            self._board = self._link.board
        self._window_bytes = opened.window_bytes
        self._queue = PushQueue(
            transport.part_bytes, transport.batch_bytes, halves=not transport.reads_in_place
        )
        self._tasks = [
            asyncio.create_task(self._guard(self._listen), name="pair-listen"),
            asyncio.create_task(self._guard(self._speak), name="pair-speak"),
            asyncio.create_task(self._guard(self._read_ahead), name="pair-read-ahead"),
            asyncio.create_task(self._guard(self._announce), name="pair-announce"),
        ]
        log.info("blocks are sent to %s by %s", self.peer.incarnation, self.transport)

    def _check_fit(self, transport: Transport) -> None:
        self.fit = check_geometry(self._identity.geometry, self.geometry)
        if self.fit is Fit.CONVERTIBLE and not transport.copies_out:
            raise HandoffError(
                f"{self.peer.incarnation} chose {transport.name}, which cannot send converted"
                f" blocks: it has {self.geometry}, this worker has {self._identity.geometry}"
            )

    def _shard_with(self, peer: Peer) -> ShardLayout | None:
        theirs = Identity(peer.incarnation, self._identity.fingerprint, self.geometry, peer.rank)
        return shard_between(self._identity, theirs)

    def runs(self, target: int, first: int, last: int) -> list[tuple[int, int]]:
        """Return the (offset, bytes) pairs to send for the layers ``first`` … ``last - 1`` of block
        ``target``."""
        if self._shard is not None:
            has = self._shard.shard.has(target)
            return self._shard.layer_runs(first, last) if has else []
        if (first, last) == (0, self.geometry.layers):
            return self._whole_block
        return self._layout.layer_runs(first, last)

    async def close(self) -> None:
        """Close the pair, which fails its pushes."""
        self._break(WorkerFailed(f"the pair with {self.peer.incarnation} was closed"))
        await end_tasks(self._tasks)
        if self._reading:
            # The memory may be freed afterwards.
            await asyncio.wait(self._reading, timeout=self._limits.silence_s)

    def _break(self, error: BatonError) -> None:
        if self.broken.done():
            return
        self.broken.set_result(error)
        for task in self._tasks:
            task.cancel()
        if self._call is not None:
            self._call.cancel()
        if self._link is not None:
            self._link.close()
        for number in list(self._in_flight):
            self._free(number)
        self._in_flight.clear()
        self.in_flight_bytes = 0
        for push in list(self._pushes.values()):
            push.broke(error)

    async def _guard(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await work()
        except BatonError as error:
            self._break(error)
        except asyncio.CancelledError:
            self._break(WorkerFailed(f"{self.peer.incarnation}: the pair's stream was cancelled"))
            raise
        except Exception as error:
            log.exception("a pair failed")
            self._break(HandoffError(f"a pair failed: {type(error).__name__}"))

    # Sending

    def push(self, ticket_id: str, memory: BlockMemory | None = None) -> Push:
        """Start to send blocks to a ticket of the receiver.

        Without ``memory``, the worker's own blocks are sent. If the receiver's ``geometry`` differs
        from the worker's, ``memory`` holds the blocks, converted to that geometry.
        """
        push = Push(self, ticket_id, memory)
        self._pushes[ticket_id] = push
        if self.broken.done():
            push.broke(self.broken.result())
        return push

    def put(self, ticket_id: str, target: int, source: int, offset: int, length: int) -> None:
        """Queue part of block ``source`` for the ticket's missing block ``target``; called by
        ``Push``."""
        self._queue.put(ticket_id, target, source, offset, length)
        self._wake.set()

    def drop(self, ticket_id: str) -> None:
        """Remove a ticket's parts from the queue; called by ``Push``."""
        self._queue.drop(ticket_id)

    def forget(self, push: Push) -> None:
        """Remove a push that is over from the pair; called by ``Push``."""
        self._pushes.pop(push.ticket_id, None)

    async def _read_ahead(self) -> None:
        """Read batches from the blocks. One batch is read ahead while others are in flight."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            batch = self._queue.take()
            while self._in_flight and self.in_flight_bytes + batch.bytes > self._window_bytes:
                self._wake.clear()
                await self._wake.wait()
            push = self._pushes.get(batch.ticket_id)
            if push is not None and push.is_open:
                number = self._begin(batch, push)
                seal = self._seals.get(number)
                if self._reads_in_place:
                    self._tell(_announcement(number, batch, seal=seal))
                    # The message leaves first: the thread that reads may take this one's core.
                    await self._requests.join()
                reading = self._read(number, batch, push, seal)
                if seal is not None:
                    self._publishing[number] = reading
                await self._reads.put((number, batch, reading))

    def _begin(self, batch: PushBatch, push: Push) -> int:
        """Count a batch as in flight from now on. Returns the batch's number."""
        number, self._next = self._next, self._next + 1
        push.announced(batch.bytes)
        self._in_flight[number] = batch
        self.in_flight_bytes += batch.bytes
        seal = None if self._board is None else self._board.take(len(batch.targets))
        if seal is not None:
            self._seals[number] = seal
        return number

    def _free(self, number: int) -> None:
        """Free what was kept for the receiver of a batch: its bytes, and its place on the board
        once no thread publishes there any more."""
        if (region := self._regions.pop(number, None)) is not None:
            region.release()
        seal, reading = self._seals.pop(number, None), self._publishing.pop(number, None)
        if seal is None or self._board is None:
            return
        give_back = self._board.give_back
        if reading is None or reading.done():
            give_back(seal)
        else:
            reading.add_done_callback(lambda _: give_back(seal))

    def _read(
        self, number: int, batch: PushBatch, push: Push, seal: Seal | None
    ) -> asyncio.Future[_Read]:
        assert self._link is not None, "not open"
        reading = self._loop.run_in_executor(
            self._executor, _pack, self._link, number, batch, push.memory, seal
        )
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return reading

    async def _announce(self) -> None:
        """Announce batches that were read, or seal announced ones, and send them. The order is that
        of their numbers."""
        assert self._link is not None, "not open"
        while True:
            number, batch, reading = await self._reads.get()
            # Shielded: the thread continues to read, and ``close`` waits for it.
            packed, is_published = await asyncio.shield(reading)
            if packed.region is not None and number in self._in_flight:
                self._regions[number] = packed.region
            if not self._reads_in_place:
                self._tell(
                    _announcement(number, batch, _sealed(batch, packed), region=packed.region)
                )
            elif not is_published:
                message = transfer_pb2.SealBatch(number=number, checksums=_sealed(batch, packed))
                self._requests.put_nowait(Request(sealed=[message]))
            transfer = self._link.send(number, packed, self._limits.batch_deadline_s)
            transfer.when_over(self._sent)

    def _tell(self, announcement: transfer_pb2.AnnounceBatch) -> None:
        self.bandwidth.began(time.monotonic())
        self._requests.put_nowait(Request(announced=[announcement]))

    def _sent(self, transfer: Transfer) -> None:
        """Break the pair if a transfer has failed. A thread of the transport calls this when a
        transfer ends."""
        error = transfer.error
        if error is None:
            return
        failure = error if isinstance(error, BatonError) else WorkerFailed("sending ended")
        with contextlib.suppress(RuntimeError):  # the loop may be closed
            self._loop.call_soon_threadsafe(self._break, failure)

    # Receiving answers

    async def _listen(self) -> None:
        while True:
            answer = await self._next_answer()
            for landed in answer.landed:
                self._landed(landed)
            if answer.HasField("renewed"):
                self._owed_since = None
                for ticket_id in answer.renewed.ended_ticket_ids:
                    self._ended_there(ticket_id)

    def _ended_there(self, ticket_id: str) -> None:
        """Fail the push of a ticket, because the receiver reports that the ticket is no longer
        open.

        A rank other than 0 cannot distinguish a failure from a commit that it has not been informed
        of. If all bytes have arrived, rank 0 decides.
        """
        push = self._pushes.get(ticket_id)
        if push is not None and (self._identity.rank == 0 or push.is_under_way):
            push.fail(TicketEnded(f"{self.peer.incarnation} has ended ticket {ticket_id}"))

    def _landed(self, message: transfer_pb2.BatchLanded) -> None:
        batch = self._in_flight.pop(message.number, None)
        if batch is None:
            return
        self._free(message.number)
        self.in_flight_bytes -= batch.bytes
        self.bandwidth.landed(batch.bytes, time.monotonic(), is_idle=not self._in_flight)
        self._wake.set()
        push = self._pushes.get(batch.ticket_id)
        if push is None:
            return
        if message.code:
            push.fail(error_from_code(message.code, message.error))
        push.landed(batch.bytes)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Check within this context that the receiver is not silent, even if no blocks are sent."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1

    def heartbeat(self, now: float) -> None:
        """Renew the leases of open pushes; fail the pair if its receiver is silent or stuck."""
        if self.broken.done() or not self.transport:
            return
        if self._owed_since is not None and now - self._owed_since >= self._limits.silence_s:
            silent = f"{self.peer.incarnation} was silent for {now - self._owed_since:.1f} s"
            self._break(WorkerFailed(silent))
        elif self._is_stuck(now):
            late = f"a batch had not arrived after {self._limits.batch_deadline_s} s"
            self._break(WorkerFailed(f"{self.peer.incarnation}: {late}"))
        elif self._users or self._pushes:
            self._owed_since = self._owed_since or now
            renewal = transfer_pb2.RenewLeases(ticket_ids=list(self._pushes))
            self._requests.put_nowait(Request(renew=renewal))

    def _is_stuck(self, now: float) -> bool:
        """Whether the receiver answers heartbeats, but has not confirmed the oldest batch in time.

        Such a pair must fail, because callers release blocks only when no batch is in flight.
        """
        oldest = next(iter(self._in_flight), None)
        if oldest != self._oldest:
            self._oldest, self._oldest_since = oldest, now
        return oldest is not None and now - self._oldest_since >= self._limits.batch_deadline_s

    async def _speak(self) -> None:
        while True:
            await self._write(await all_at_once(self._requests))

    async def _write(self, request: Request) -> None:
        assert self._call is not None, "not open"
        async with stream_errors(self._call, self.peer.incarnation):
            await self._call.write(request)

    async def _next_answer(self) -> transfer_pb2.TransferResponse:
        assert self._call is not None, "not open"
        async with stream_errors(self._call, self.peer.incarnation):
            answer = await self._call.read()
        if not isinstance(answer, transfer_pb2.TransferResponse):
            raise await stream_ending(self._call, self.peer.incarnation)
        return answer


def _sealed(batch: PushBatch, packed: Packed) -> tuple[int, ...]:
    if not packed.checksums:  # tags are bound to their places already
        return ()
    return seal_checksums(packed.checksums, batch.ticket_id, batch.targets, batch.offset)


def _pack(
    link: SendLink,
    number: int,
    batch: PushBatch,
    memory: BlockMemory | None,
    seal: Seal | None,
) -> _Read:
    """Read a batch, on a transfer thread, and publish its checksums if it has a place for them."""
    packed = link.pack(number, Parts(batch.sources, batch.offset, batch.length), memory)
    if seal is not None:
        seal.publish(_sealed(batch, packed))
    return packed, seal is not None


def _announcement(
    number: int,
    batch: PushBatch,
    checksums: Sequence[int] = (),
    seal: Seal | None = None,
    region: Region | None = None,
) -> transfer_pb2.AnnounceBatch:
    return transfer_pb2.AnnounceBatch(
        number=number,
        ticket_id=batch.ticket_id,
        offset=batch.offset,
        length=batch.length,
        targets=batch.targets,
        sources=batch.sources,
        checksums=checksums,
        seal_at=None if seal is None else seal.at,
        seal_mark=0 if seal is None else seal.mark,
        staged_at=0 if region is None else region.at,
    )
