"""The receiver's ends of this worker's pairs.

A pair's states, one for each stream that a writer opens:

    opening ─fingerprint, geometry and a transport agreed→ open
    opening ─refused→ closed
    open ─stream broken, writer silent, transport failed→ closed

When a pair closes its link does, so that nothing of it can be written any more, and what its writer
had not sent in full is released. Owned by the event loop; transfers end on other threads and are
told of here.
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
from baton.rpc import convert
from baton.rpc.grpc_errors import grpc_boundary
from baton.v1 import transfer_pb2
from kvtransfer.pairs.negotiation import Fit, rank_transports
from kvtransfer.pairs.pair import (
    Identity,
    PairLimits,
    all_at_once,
    check_peer,
    raw_checksum,
    shard_between,
)
from kvtransfer.tickets import Ticket
from kvtransfer.transports.in_place import are_on_two_hosts
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import (
    Batch,
    Parts,
    Peer,
    ReceiveLink,
    Transport,
    accept_shard,
    damaged,
)

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[transfer_pb2.TransferRequest, transfer_pb2.TransferResponse]
Response = transfer_pb2.TransferResponse


_WITHOUT_STAGING = 4
"""Times the window of a pair whose transport copies from blocks to blocks."""


class TicketKeeper(Protocol):
    """Owns the tickets; all its methods run on the event loop."""

    @property
    def clock(self) -> Callable[[], float]:
        """The clock of leases and of peers' silence, in seconds."""

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
        """See ``Ticket.begin_copy``."""

    def end_copy(self, ticket_id: str, transport: str, copied: int) -> None:
        """A copy has ended well."""

    def fail_copy(self, ticket_id: str, error: BatonError, now: float) -> None:
        """A copy has failed: the ticket ends."""

    def drop_copy(self, ticket_id: str) -> None:
        """A copy was never begun, because its ticket had ended."""

    def renew(self, writer: str, ticket_ids: Sequence[str], now: float) -> list[str]:
        """A writer's heartbeat. Returns the tickets that have ended."""

    def writer_gone(self, writer: str, now: float) -> None:
        """A writer's pair has closed."""


class Inbound:
    """All pairs in which this worker receives. Hears of released tickets from their keeper."""

    def __init__(
        self,
        identity: Identity,
        transports: Sequence[Transport],
        keeper: TicketKeeper,
        limits: PairLimits,
        rank_addresses: Sequence[str] = (),
    ) -> None:
        """``transports`` are registered.

        ``rank_addresses``: host:port of the gRPC server of each rank, of a worker that has several.
        """
        self.identity = identity
        self.limits = limits
        self.keeper = keeper
        self._rank_addresses = rank_addresses
        self._transports = {transport.name: transport for transport in transports}
        self._warned: set[tuple[str, str]] = set()
        """A transport that was wanted and the one taken: a warning for each, not for each pair."""
        self._pairs: dict[tuple[str, int], InboundPair] = {}
        """By the writer's incarnation and rank."""
        self._transfers: dict[str, set[Transfer]] = {}

    def pairs(self) -> dict[str, str]:
        """The transport of each open pair, by the writer's incarnation."""
        return {writer: pair.transport for (writer, _), pair in self._pairs.items()}

    async def serve(
        self, requests: AsyncIterator[transfer_pb2.TransferRequest], context: Context
    ) -> None:
        """One pair's stream, to its end."""
        async with grpc_boundary(context):  # type: ignore[arg-type]
            first = await anext(requests, None)
            if first is None or not first.HasField("open"):
                raise HandoffError("a pair's first message must open it")
            pair, answer = self._open(first.open)
            key = pair.writer, pair.writer_rank
            replaced = self._pairs.get(key)
            if replaced is not None:
                replaced.end(WorkerFailed(f"{pair.writer} has opened its pair anew"))
            self._pairs[key] = pair
            try:
                await context.write(answer)
                await pair.run(requests, context)
            finally:
                pair.close()
                if self._pairs.get(key) is pair:
                    del self._pairs[key]
                    self.keeper.writer_gone(pair.writer, self.keeper.clock())

    def _open(self, message: transfer_pb2.OpenPair) -> tuple[InboundPair, Response]:
        geometry = convert.geometry_from_proto(message.geometry)
        writer = Identity(message.writer, message.fingerprint, geometry, message.writer_rank)
        fit = check_peer(self.identity, writer, message.receiver)
        if message.receiver_rank != self.identity.rank:
            raise HandoffError(
                f"here is {self.identity.name}, not its rank {message.receiver_rank}"
            )
        shard = shard_between(writer, self.identity)
        offers = {offer.transport: offer.offer for offer in message.offers}
        peer = Peer(writer.name, "", writer.rank)
        refusals: dict[str, str] = {}
        for name in rank_transports(offers, self._transports):
            if fit is Fit.CONVERTIBLE and not self._transports[name].copies_out:
                refusals[name] = (
                    f"it sends blocks as they lie, and those of {geometry} must become those of "
                    f"{self.identity.geometry}"
                )
                continue
            try:
                link, answer = accept_shard(self._transports[name], peer, offers[name], shard)
            except HandoffError as error:
                refusals[name] = error.message
                continue
            opened = transfer_pb2.PairOpened(
                transport=name,
                answer=answer,
                window_bytes=self._window(self._transports[name]),
                geometry=convert.geometry_to_proto(self.identity.geometry),
                rank_addresses=self._rank_addresses,
            )
            log.info("%s sends blocks to %s by %s", writer.name, self.identity.name, name)
            for wanted, reason in refusals.items():
                apart = are_on_two_hosts(self._transports[wanted].offer(), offers[wanted])
                self._log_fallback(writer.name, wanted, name, reason, apart=apart)
            pair = InboundPair(self, writer, self._transports[name], link)
            return pair, Response(opened=opened)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise HandoffError(
            f"no transport from {writer.name} to {self.identity.name} works: {reasons}"
        )

    def _log_fallback(
        self, writer: str, wanted: str, taken: str, reason: str, *, apart: bool
    ) -> None:
        """Say why a pair takes a worse transport; the first time as a warning.

        Where the two are ``apart``, on two hosts, the better one cannot work.
        """
        level = logging.INFO
        if not apart and (wanted, taken) not in self._warned:
            self._warned.add((wanted, taken))
            level = logging.WARNING
        log.log(
            level,
            "%s sends blocks to %s by %s instead of %s: %s",
            writer,
            self.identity.name,
            taken,
            wanted,
            reason,
        )

    def _window(self, transport: Transport) -> int:
        """What bounds staging matters less where there is none: blocks are read where they lie."""
        stages = transport.copies_out or transport.staging_bytes
        return self.limits.window_bytes * (1 if stages else _WITHOUT_STAGING)

    def began(self, ticket_id: str, transfer: Transfer) -> None:
        """A transfer for a ticket is under way."""
        self._transfers.setdefault(ticket_id, set()).add(transfer)

    def ended(self, ticket_id: str, transfer: Transfer) -> None:
        """It is over."""
        transfers = self._transfers.get(ticket_id, set())
        transfers.discard(transfer)
        if not transfers:
            self._transfers.pop(ticket_id, None)

    # What the keeper tells

    def completed(self, ticket: Ticket) -> None:
        """Nothing to do."""

    def released(self, ticket: Ticket, error: BatonError) -> None:
        """Copies for it that have not begun never will."""
        for transfer in list(self._transfers.get(ticket.ticket_id, ())):
            transfer.cancel()

    def sweep(self, now: float) -> None:
        """Close pairs whose writers owe bytes, and are silent or have owed them for too long."""
        for pair in list(self._pairs.values()):
            stuck = pair.stuck(now)
            if stuck is not None:
                pair.end(stuck)

    def close(self) -> None:
        """Close every pair."""
        for pair in list(self._pairs.values()):
            pair.end(WorkerFailed(f"{self.identity.incarnation} is stopping"))


class InboundPair:
    """One stream; see the module's text."""

    def __init__(
        self, inbound: Inbound, writer: Identity, transport: Transport, link: ReceiveLink
    ) -> None:
        self.writer, self.writer_rank = writer.incarnation, writer.rank
        self._name = writer.name
        self.transport = transport.name
        self._reads_in_place = transport.reads_in_place
        self._inbound = inbound
        self._link = link
        self._answers: asyncio.Queue[Response] = asyncio.Queue()
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._next = 0
        self._awaited: dict[int, float] = {}
        """Batches that have not landed, oldest first, and since when."""
        self._copies: dict[int, _Copy] = {}
        """Batches that were let in and have not landed."""
        self._heard_at = inbound.keeper.clock()

    async def run(
        self, requests: AsyncIterator[transfer_pb2.TransferRequest], context: Context
    ) -> None:
        """Until the writer ends the stream. Raises BatonError where it must be ended from here."""
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
        """Why the bytes that are awaited will not come; None where there is still hope."""
        if not self._awaited:
            return None
        limits = self._inbound.limits
        if now - self._heard_at > limits.silence_s:
            return WorkerFailed(f"{self._name} is silent")
        # A writer may live whose bytes go astray.
        number, since = next(iter(self._awaited.items()))
        if now - since > limits.batch_deadline_s:
            return DeadlineExceeded(f"batch {number} of {self._name} has not come in time")
        return None

    def end(self, error: BatonError) -> None:
        """Close it with an error; idempotent."""
        if not self._ended.done():
            self._ended.set_exception(error)
        self.close()

    def close(self) -> None:
        """Nothing of it is written from now on; idempotent."""
        if not self._ended.done():
            self._ended.set_result(None)
        self._ended.exception()  # looked at, so that asyncio does not log it
        self._link.close()
        for copy in list(self._copies.values()):
            self._compare(copy)

    async def _answer(self, context: Context) -> None:
        while True:
            await context.write(await all_at_once(self._answers))

    async def _read(self, requests: AsyncIterator[transfer_pb2.TransferRequest]) -> None:
        async for request in requests:
            self._heard_at = self._inbound.keeper.clock()
            if request.HasField("open"):
                raise HandoffError("a pair is opened once")
            for announced in request.announced:
                self._announced(announced)
            for seal in request.sealed:
                self._sealed(seal)
            if request.HasField("renew"):
                ended = self._inbound.keeper.renew(
                    self.writer, list(request.renew.ticket_ids), self._heard_at
                )
                renewed = transfer_pb2.LeasesRenewed(ended_ticket_ids=ended)
                self._answers.put_nowait(Response(renewed=renewed))

    def _announced(self, message: transfer_pb2.AnnounceBatch) -> None:
        count = len(message.targets)
        if message.number != self._next:
            raise HandoffError(f"batch {message.number} came where {self._next} was awaited")
        checksums = len(message.checksums)
        follow = self._reads_in_place and not checksums
        if not (count == len(message.sources) > 0) or not (follow or checksums == count):
            raise HandoffError(f"batch {message.number} lists unequal numbers of parts")
        self._next += 1
        error: BatonError | None = None
        blocks: tuple[int, ...] | None = None
        try:
            blocks = self._inbound.keeper.begin_copy(
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
        deadline_s = self._inbound.limits.batch_deadline_s
        transfer = self._link.receive(batch, deadline_s, wanted=blocks is not None)
        self._awaited[batch.number] = self._heard_at
        if blocks is None:
            end = partial(self._landed, batch.number, error)
        else:
            copy = _Copy(message.ticket_id, batch, tuple(message.targets), transfer)
            self._copies[batch.number] = copy
            self._inbound.began(message.ticket_id, transfer)
            end = partial(self._over, copy)
        transfer.when_over(lambda _: self._tell(end))

    def _tell(self, end: partial[None]) -> None:
        try:
            self._loop.call_soon_threadsafe(end)
        except RuntimeError:
            # The loop was closed: nobody is left to be told.
            return

    def _sealed(self, message: transfer_pb2.SealBatch) -> None:
        """The checksums of a batch that was announced without. What has ended needs none."""
        copy = self._copies.get(message.number)
        if copy is None:
            return
        if copy.expected is not None or len(message.checksums) != len(copy.targets):
            raise HandoffError(f"batch {message.number} has other checksums, or another number")
        copy.expected = _raw(message.checksums, copy.ticket_id, copy.targets, copy.batch)
        self._compare(copy)

    def _over(self, copy: _Copy) -> None:
        """A transfer for which the keeper gave blocks has ended."""
        self._inbound.ended(copy.ticket_id, copy.transfer)
        try:
            copy.transfer.poll()
        except CancelledError:
            self._inbound.keeper.drop_copy(copy.ticket_id)
            self._end_copy(copy, TicketEnded(f"ticket {copy.ticket_id} has ended"))
        except Exception as failure:
            self._failed(copy, _as_baton_error(failure))
        else:
            copy.is_placed = True
            self._compare(copy)

    def _compare(self, copy: _Copy) -> None:
        """Let its bytes count, once they are placed and known to be the writer's."""
        if not copy.is_placed:
            return
        if copy.expected is None:
            if self._ended.done():
                self._failed(copy, WorkerFailed(f"{self._name} has sent bytes, and no checksums"))
        elif copy.expected != copy.transfer.found:
            self._failed(copy, damaged(copy.batch.number))
        else:
            self._inbound.keeper.end_copy(copy.ticket_id, self.transport, copy.batch.target.bytes)
            self._end_copy(copy, None)

    def _failed(self, copy: _Copy, error: BatonError) -> None:
        self._end_copy(copy, error)
        keeper = self._inbound.keeper
        keeper.fail_copy(copy.ticket_id, error, keeper.clock())
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
    """A batch on its way into blocks."""

    ticket_id: str
    batch: Batch
    targets: tuple[int, ...]
    """The ticket's missing blocks."""
    transfer: Transfer
    expected: tuple[int, ...] | None = None
    """What the transfer must have found: nothing where it compares, unknown before it is sealed."""
    is_placed: bool = False

    def __post_init__(self) -> None:
        if self.batch.checksums:
            self.expected = ()


def _batch(message: transfer_pb2.AnnounceBatch, blocks: tuple[int, ...] | None) -> Batch:
    source = Parts(tuple(message.sources), message.offset, message.length)
    target = Parts(blocks or (), message.offset, message.length)
    batch = Batch(message.number, source, target, ())
    if not message.checksums:
        return batch
    raw = _raw(message.checksums, message.ticket_id, message.targets, batch)
    return replace(batch, checksums=raw)


def _raw(
    sealed: Sequence[int], ticket_id: str, targets: Sequence[int], batch: Batch
) -> tuple[int, ...]:
    return tuple(
        raw_checksum(checksum, ticket_id, target, batch.source.offset)
        for checksum, target in zip(sealed, targets, strict=True)
    )


def _as_baton_error(failure: Exception) -> BatonError:
    if isinstance(failure, BatonError):
        return failure
    log.error("a copy failed", exc_info=failure)
    return HandoffError(f"blocks could not be copied: {type(failure).__name__}")
