"""The receiver's ends of this worker's pairs: opens them, and closes silent ones.

``kvtransfer.pairs.inbound_pair`` implements one of them. Owned by the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence

import grpc.aio

from baton.errors import (
    BatonError,
    HandoffError,
    WorkerFailed,
)
from baton.rpc import convert
from baton.rpc.grpc_errors import grpc_boundary
from baton.v1 import transfer_pb2
from kvtransfer.pairs.inbound_pair import InboundPair, TicketKeeper, TicketTransfers
from kvtransfer.pairs.negotiation import Fit, rank_transports
from kvtransfer.pairs.pair import (
    Identity,
    PairLimits,
    check_peer,
    shard_between,
)
from kvtransfer.tickets import Ticket
from kvtransfer.transports.in_place import are_on_two_hosts
from kvtransfer.transports.transport import (
    Peer,
    Transport,
    accept_shard,
)

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[transfer_pb2.TransferRequest, transfer_pb2.TransferResponse]
Response = transfer_pb2.TransferResponse


_WITHOUT_STAGING = 4
"""Factor by which the window of a pair is multiplied if its transport copies directly between
blocks, without staging memory."""


class Inbound:
    """All pairs in which this worker receives blocks. ``keeper`` reports released tickets to this
    object."""

    def __init__(
        self,
        identity: Identity,
        transports: Sequence[Transport],
        keeper: TicketKeeper,
        limits: PairLimits,
        rank_addresses: Sequence[str] = (),
    ) -> None:
        """``transports`` have registered this worker's blocks.

        ``rank_addresses`` has host:port of each rank's gRPC server, if the worker has several.
        """
        self.identity = identity
        self.limits = limits
        self.keeper = keeper
        self._rank_addresses = rank_addresses
        self._transports = {transport.name: transport for transport in transports}
        self._warned: set[tuple[str, str]] = set()
        """Pairs of (wanted, chosen) transport names for which a warning was logged already."""
        self._pairs: dict[tuple[str, int], InboundPair] = {}
        """Open pairs by the writer's (incarnation, rank)."""
        self._transfers = TicketTransfers()

    def pairs(self) -> dict[str, str]:
        """The name of each open pair's transport. The keys are the writers' incarnations."""
        return {writer: pair.transport for (writer, _), pair in self._pairs.items()}

    async def serve(
        self, requests: AsyncIterator[transfer_pb2.TransferRequest], context: Context
    ) -> None:
        """Serve the stream of one writer until it ends. Each stream is one pair."""
        async with grpc_boundary(context):  # type: ignore[arg-type]
            first = await anext(requests, None)
            if first is None or not first.HasField("open"):
                raise HandoffError("a pair's first message must open it")
            pair, answer = self._open(first.open)
            key = pair.writer, pair.writer_rank
            replaced = self._pairs.get(key)
            if replaced is not None:
                replaced.end(WorkerFailed(f"{pair.writer} has opened its pair again"))
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
                f"this is {self.identity.name}, not its rank {message.receiver_rank}"
            )
        shard = shard_between(writer, self.identity)
        offers = {offer.transport: offer.offer for offer in message.offers}
        peer = Peer(writer.name, "", writer.rank)
        refusals: dict[str, str] = {}
        for name in rank_transports(offers, self._transports):
            if fit is Fit.CONVERTIBLE and not self._transports[name].copies_out:
                refusals[name] = (
                    f"it sends blocks unconverted, and {geometry} must be converted to "
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
            pair = InboundPair(
                writer, self._transports[name], link, self.keeper, self.limits, self._transfers
            )
            return pair, Response(opened=opened)
        reasons = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise HandoffError(
            f"no transport from {writer.name} to {self.identity.name} works: {reasons}"
        )

    def _log_fallback(
        self, writer: str, wanted: str, taken: str, reason: str, *, apart: bool
    ) -> None:
        """Log why a pair uses a worse transport than the wanted one. The first time, this is logged
        as a warning.

        If ``apart``, the two workers are on different hosts. The better transport cannot work then,
        so no warning is logged.
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
        """Return the window of a pair: the maximum number of bytes that are announced and have not
        arrived.

        The window is larger for a transport without staging memory, because the receiver then reads
        the writer's blocks in place.
        """
        stages = transport.copies_out or transport.staging_bytes
        return self.limits.window_bytes * (1 if stages else _WITHOUT_STAGING)

    # Reports of the keeper

    def released(self, ticket: Ticket, error: BatonError) -> None:
        """Cancel the copies of a released ticket that have not begun."""
        self._transfers.cancel(ticket.ticket_id)

    def sweep(self, now: float) -> None:
        """Close pairs whose writer is silent while data is due, or has not delivered a batch in
        time."""
        for pair in list(self._pairs.values()):
            stuck = pair.stuck(now)
            if stuck is not None:
                pair.end(stuck)

    def close(self) -> None:
        """Close every pair."""
        for pair in list(self._pairs.values()):
            pair.end(WorkerFailed(f"{self.identity.incarnation} is stopping"))
