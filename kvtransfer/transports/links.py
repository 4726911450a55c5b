"""What the links of several transports share."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from baton.errors import BatonError, ChecksumMismatch, HandoffError, WorkerFailed
from kvtransfer.layout.share_layout import ShareLayout
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import (
    Batch,
    Packed,
    Parts,
    Peer,
    ReceiveLink,
    SendLink,
    SharingTransport,
    Transport,
)


def accept_share(
    transport: Transport, peer: Peer, offer: bytes, share: ShareLayout | None
) -> tuple[ReceiveLink, bytes]:
    """``Transport.accept``, of a pair of ranks. Raises HandoffError where it carries none."""
    if share is None:
        return transport.accept(peer, offer)
    return _sharing(transport).accept(peer, offer, share)


def connect_share(
    transport: Transport, peer: Peer, answer: bytes, share: ShareLayout | None
) -> SendLink:
    """``Transport.connect``, of a pair of ranks. Raises HandoffError where it carries none."""
    if share is None:
        return transport.connect(peer, answer)
    return _sharing(transport).connect(peer, answer, share)


def _sharing(transport: Transport) -> SharingTransport:
    if isinstance(transport, SharingTransport):
        return transport
    raise HandoffError(
        f"transport {transport.name} is for workers of one rank each: workers of several exchange "
        "blocks by shm or grpc"
    )


class OpenTransfers:
    """The transfers of one link. Safe among threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Transfer] = set()
        self._error: BatonError | None = None

    @property
    def error(self) -> BatonError | None:
        """What has ended the link, if anything has."""
        return self._error

    def new(self) -> Transfer:
        """A transfer; on a link that has ended it has failed already."""
        transfer = Transfer()
        with self._lock:
            if self._error is None:
                self._open.add(transfer)
        if self._error is not None:
            transfer.fail(self._error)
        transfer.when_over(self._forget)
        return transfer

    def _forget(self, transfer: Transfer) -> None:
        with self._lock:
            self._open.discard(transfer)

    def end(self, error: BatonError) -> None:
        """Fail all, and every one to come; the first error counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            rest, self._open = self._open, set()
        for transfer in rest:
            transfer.give_up(error)


def place(
    memory: BlockMemory,
    batch: Batch,
    source: memoryview,
    starts: Sequence[int],
    first: int = 0,
) -> tuple[int, ...]:
    """Write parts of a batch, from ``first`` on, to their blocks: they begin at ``starts``.

    Returns their checksums. Raises ChecksumMismatch for one that is not what was announced, where
    checksums were.
    """
    parts, count = batch.target, len(starts)
    blocks = parts.blocks[first : first + count]
    found = memory.write_many(blocks, parts.offset, parts.length, source, starts)
    if batch.checksums and found != batch.checksums[first : first + count]:
        raise damaged(batch.number)
    return found


def check_part(found: int, expected: int, batch: Batch) -> None:
    """Compare a part's checksum with the announced one. Raises ChecksumMismatch."""
    if found != expected:
        raise damaged(batch.number)


def damaged(number: int) -> ChecksumMismatch:
    """The error of a batch whose bytes are not those that its writer has."""
    return ChecksumMismatch(f"a part of batch {number} arrived damaged")


class ReadSendLink:
    """Implements ``SendLink`` where the receiver reads: there is nothing to send."""

    def __init__(self, memory: BlockMemory) -> None:
        self._memory = memory
        self._transfers = OpenTransfers()

    def pack(self, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """See ``SendLink``."""
        assert memory is None or memory is self._memory, "the receiver cannot read other memory"
        sums = self._memory.checksum_many(parts.blocks, parts.offset, parts.length)
        return Packed(parts, sums)

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        """See ``SendLink``."""
        transfer = self._transfers.new()
        transfer.finish()
        return transfer

    def close(self) -> None:
        """See ``SendLink``."""
        self._transfers.end(WorkerFailed("the pair was closed"))
