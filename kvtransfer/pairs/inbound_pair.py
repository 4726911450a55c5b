"""The receiver's end of one pair: one stream of a writer.

    opening ─fingerprint, geometry and a transport agreed→ open
    opening ─refused→ closed
    open ─stream fails, writer silent, transport failed→ closed

When a pair closes, its link closes too, so nothing can be written through it any more. Tickets that
its writer had not sent in full are released. Owned by the event loop; transfers end on other
threads and are reported here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import grpc.aio

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    DeadlineExceeded,
    HandoffError,
    TicketEnded,
    WorkerFailed,
)
from baton.host.background import end_tasks
from baton.v1 import transfer_pb2
from kvtransfer.memory.seal_board import read_seal
from kvtransfer.pairs.pair import Identity, PairLimits, all_at_once, unseal_checksums
from kvtransfer.transports.in_place import ReadReceiveLink
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Parts, ReceiveLink, Transport, damaged

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[transfer_pb2.TransferRequest, transfer_pb2.TransferResponse]
Response = transfer_pb2.TransferResponse


_LOOK_S = 0.001
"""Seconds between two looks for checksums in the writer's memory: the resolution of the loop's
timers."""


class TicketKeeper(Protocol):
    """Interface of the object that owns the tickets. All its methods run on the event loop."""

    @property
    def clock(self) -> Callable[[], float]:
        """The clock for leases and for the silence of peers; it returns seconds."""

    def begin_copy(
        self,
        ticket_id: str,
        writer: str,
        transport: str,
        targets: Sequence[int],
        offset: int,
        length: int,
        now: float,
        rank: int = 0,
    ) -> tuple[int, ...] | None:
        """Allow a copy into a ticket's blocks: see ``Ticket.begin_copy``."""

    def end_copy(self, ticket_id: str, transport: str, copied: int) -> None:
        """Record that a copy of ``copied`` bytes into a ticket's blocks has succeeded."""

    def fail_copy(self, ticket_id: str, error: BatonError, now: float) -> None:
        """Record that a copy into a ticket's blocks has failed, which ends the ticket."""

    def drop_copy(self, ticket_id: str) -> None:
        """Record that a copy did not begin, because its ticket had ended."""

    def renew(self, writer: str, ticket_ids: Sequence[str], now: float) -> list[str]:
        """Renew the leases of a writer's tickets after its heartbeat. Returns the ids of those
        tickets that have ended."""

    def writer_gone(self, writer: str, now: float) -> None:
        """Record that a writer's pair has closed, so no more bytes arrive from that writer."""


class TicketTransfers:
    """The transfers in flight for each ticket, over all pairs of this worker."""

    def __init__(self) -> None:
        self._transfers: dict[str, set[Transfer]] = {}

    def __len__(self) -> int:
        """Number of tickets that have a transfer in flight."""
        return len(self._transfers)

    def add(self, ticket_id: str, transfer: Transfer) -> None:
        """Add a transfer that is in flight."""
        self._transfers.setdefault(ticket_id, set()).add(transfer)

    def discard(self, ticket_id: str, transfer: Transfer) -> None:
        """Remove a transfer of a ticket, because the transfer is over."""
        transfers = self._transfers.get(ticket_id, set())
        transfers.discard(transfer)
        if not transfers:
            self._transfers.pop(ticket_id, None)

    def cancel(self, ticket_id: str) -> None:
        """Cancel copies into a ticket's blocks, unless they have begun."""
        for transfer in list(self._transfers.get(ticket_id, ())):
            transfer.cancel()


class InboundPair:
    """The receiver's end of one pair: serves one stream of a writer."""

    def __init__(
        self,
        writer: Identity,
        transport: Transport,
        link: ReceiveLink,
        keeper: TicketKeeper,
        limits: PairLimits,
        transfers: TicketTransfers,
    ) -> None:
        """``transfers`` holds the transfers of all pairs of this worker."""
        self.writer, self.writer_rank = writer.incarnation, writer.rank
        self._name = writer.name
        self.transport = transport.name
        self._reads_in_place = transport.reads_in_place
        self._encrypts = transport.encrypts
        self._keeper = keeper
        self._limits = limits
        self._transfers = transfers
        self._link = link
        self._answers: asyncio.Queue[Response] = asyncio.Queue()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._awaited: dict[int, float] = {}
        """Time since which each batch is awaited, by batch number, the oldest first. Batches that
        have arrived are removed."""
        self._copies: dict[int, _Copy] = {}
        """Batches that were admitted and have not arrived completely, by batch number."""
        self._heard_at = keeper.clock()

    async def run(
        self, requests: AsyncIterator[transfer_pb2.TransferRequest], context: Context
    ) -> None:
        """Serve the writer's stream until the writer ends it.

        Raises BatonError if the receiver has to end it.
        """
        tasks = [
            asyncio.create_task(self._read(requests), name="read"),
            asyncio.create_task(self._answer(context), name="answer"),
        ]
        try:
            await asyncio.wait([*tasks, self._ended], return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                self._ended.result()
            for task in tasks:
                if task.done():
                    task.result()
        finally:
            await end_tasks(tasks)

    def stuck(self, now: float) -> BatonError | None:
        """Return the error with which to close the pair if awaited batches can no longer arrive.
        Returns None if they still may."""
        if not self._awaited:
            return None
        limits = self._limits
        if now - self._heard_at > limits.silence_s:
            return WorkerFailed(f"{self._name} is silent")
        # A live writer's bytes may be lost.
        number, since = next(iter(self._awaited.items()))
        if now - since > limits.batch_deadline_s:
            return DeadlineExceeded(f"batch {number} of {self._name} did not arrive in time")
        return None

    def end(self, error: BatonError) -> None:
        """Close the pair with an error; idempotent."""
        if not self._ended.done():
            self._ended.set_exception(error)
        self.close()

    def close(self) -> None:
        """Close the pair: nothing is written through it from now on; idempotent."""
        if not self._ended.done():
            self._ended.set_result(None)
        self._ended.exception()  # retrieved, so that asyncio does not log it
        self._link.close()
        for copy in list(self._copies.values()):
            self._compare(copy)

    async def _answer(self, context: Context) -> None:
        while True:
            await context.write(await all_at_once(self._answers))

    async def _read(self, requests: AsyncIterator[transfer_pb2.TransferRequest]) -> None:
        async for request in requests:
            self._heard_at = self._keeper.clock()
            if request.HasField("open"):
                raise HandoffError("a pair can be opened only once")
            for announced in request.announced:
                self._announced(announced)
            for seal in request.sealed:
                self._sealed(seal)
            if request.HasField("renew"):
                ended = self._keeper.renew(
                    self.writer, list(request.renew.ticket_ids), self._heard_at
                )
                renewed = transfer_pb2.LeasesRenewed(ended_ticket_ids=ended)
                self._answers.put_nowait(Response(renewed=renewed))

    def _announced(self, message: transfer_pb2.AnnounceBatch) -> None:
        count = len(message.targets)
        if message.number != self._next:
            raise HandoffError(f"got batch {message.number}, and expected {self._next}")
        checksums = len(message.checksums)
        has_none = (self._reads_in_place or self._encrypts) and not checksums
        if not (count == len(message.sources) > 0) or not (has_none or checksums == count):
            raise HandoffError(f"batch {message.number} lists different numbers of parts")
        self._next += 1
        error: BatonError | None = None
        blocks: tuple[int, ...] | None = None
        try:
            blocks = self._keeper.begin_copy(
                message.ticket_id,
                self.writer,
                self.transport,
                list(message.targets),
                message.offset,
                message.length,
                self._heard_at,
                self.writer_rank,
            )
        except BatonError as refusal:
            error = refusal
        batch = _batch(message, blocks)
        deadline_s = self._limits.batch_deadline_s
        transfer = self._link.receive(batch, deadline_s, wanted=blocks is not None)
        self._awaited[batch.number] = self._heard_at
        if blocks is None:
            end = partial(self._landed, batch.number, error)
        else:
            copy = _Copy(message.ticket_id, batch, tuple(message.targets), transfer)
            if self._encrypts:
                copy.expected = ()
            if self._reads_in_place and message.HasField("seal_at"):
                copy.seal = message.seal_at, message.seal_mark
            self._copies[batch.number] = copy
            self._transfers.add(message.ticket_id, transfer)
            end = partial(self._over, copy)
        transfer.when_over(lambda _: self._tell(end))

    def _tell(self, end: partial[None]) -> None:
        try:
            self._loop.call_soon_threadsafe(end)
        except RuntimeError:
            # The loop was closed, so there is no receiver.
            return

    def _sealed(self, message: transfer_pb2.SealBatch) -> None:
        """Accept the checksums of a batch that was announced without checksums. They are ignored if
        the batch has ended."""
        copy = self._copies.get(message.number)
        if copy is None:
            return
        if copy.expected is not None or len(message.checksums) != len(copy.targets):
            raise HandoffError(
                f"batch {message.number} has other checksums already, or another number of them"
            )
        copy.expect(message.checksums)
        self._compare(copy)

    def _look(self, copy: _Copy) -> None:
        """Read the checksums of a batch from the writer's memory. If they are not there yet, look
        again soon."""
        if copy.seal is None or not isinstance(self._link, ReadReceiveLink):
            return
        file, (at, mark) = self._link.file, copy.seal
        found = None if file is None else read_seal(file, at, mark, len(copy.targets))
        if found is not None:
            copy.expect(found)
        elif not self._ended.done():
            self._loop.call_later(_LOOK_S, self._look_again, copy)

    def _look_again(self, copy: _Copy) -> None:
        """Compare a batch again, unless it has ended meanwhile."""
        if self._copies.get(copy.batch.number) is copy:
            self._compare(copy)

    def _over(self, copy: _Copy) -> None:
        """Process the end of a batch's copy into blocks: success, failure or cancellation."""
        self._transfers.discard(copy.ticket_id, copy.transfer)
        error = copy.transfer.error
        if error is None:
            copy.is_placed = True
            self._compare(copy)
        elif isinstance(error, CancelledError):
            self._keeper.drop_copy(copy.ticket_id)
            self._end_copy(copy, TicketEnded(f"ticket {copy.ticket_id} has ended"))
        else:
            self._failed(copy, _as_baton_error(error))

    def _compare(self, copy: _Copy) -> None:
        """Count a batch as arrived once all its bytes are stored and their checksums match the
        writer's."""
        if not copy.is_placed:
            return
        if copy.expected is None:
            self._look(copy)
        if copy.expected is None:
            if self._ended.done():
                self._failed(copy, WorkerFailed(f"{self._name} has sent bytes without checksums"))
        elif copy.expected != copy.transfer.found:
            self._failed(copy, damaged(copy.batch.number))
        else:
            self._keeper.end_copy(copy.ticket_id, self.transport, copy.batch.target.bytes)
            self._end_copy(copy, None)

    def _failed(self, copy: _Copy, error: BatonError) -> None:
        self._end_copy(copy, error)
        self._keeper.fail_copy(copy.ticket_id, error, self._keeper.clock())
        if not isinstance(error, ChecksumMismatch) and not self._ended.done():
            # The link can carry nothing more.
            self.end(error)

    def _end_copy(self, copy: _Copy, error: BatonError | None) -> None:
        del self._copies[copy.batch.number]
        self._landed(copy.batch.number, error)

    def _landed(self, number: int, error: BatonError | None) -> None:
        self._awaited.pop(number, None)
        landed = transfer_pb2.BatchLanded(number=number)
        if error is not None:
            landed.error, landed.code = error.message, error.code or ""
        self._answers.put_nowait(Response(landed=[landed]))


@dataclass(slots=True)
class _Copy:
    """A batch whose bytes are being copied into blocks."""

    ticket_id: str
    batch: AnnouncedBatch
    targets: tuple[int, ...]
    """Numbers of the ticket's missing blocks into which the batch is copied."""
    transfer: Transfer
    expected: tuple[int, ...] | None = None
    """The writer's checksums, with which the transfer's checksums must agree.

    Empty if the transfer compares them itself; None until the writer sends them.
    """
    is_placed: bool = False
    seal: tuple[int, int] | None = None
    """Where the writer publishes its checksums, and the mark of this use, if it sends no message
    with them."""

    def __post_init__(self) -> None:
        if self.batch.checksums:
            self.expected = ()

    def expect(self, sealed: Sequence[int]) -> None:
        """Set the writer's checksums, which are bound to their places."""
        offset = self.batch.source.offset
        self.expected = unseal_checksums(sealed, self.ticket_id, self.targets, offset)


def _batch(message: transfer_pb2.AnnounceBatch, blocks: tuple[int, ...] | None) -> AnnouncedBatch:
    source = Parts(tuple(message.sources), message.offset, message.length)
    target = Parts(blocks or (), message.offset, message.length)
    batch = AnnouncedBatch(message.number, source, target, (), message.staged_at)
    if not message.checksums:
        return batch
    raw = unseal_checksums(message.checksums, message.ticket_id, message.targets, message.offset)
    return replace(batch, checksums=raw)


def _as_baton_error(failure: BaseException) -> BatonError:
    if isinstance(failure, BatonError):
        return failure
    log.error("a copy failed", exc_info=failure)
    return HandoffError(f"blocks could not be copied: {type(failure).__name__}")
