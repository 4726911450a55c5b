"""What the links of several transports share."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from baton.errors import BatonError, ChecksumMismatch, HandoffError
from kvtransfer.layout.shard_layout import ShardLayout
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import (
    Batch,
    Peer,
    ReceiveLink,
    SendLink,
    ShardingTransport,
    Transport,
)


def accept_shard(
    transport: Transport, peer: Peer, offer: bytes, shard: ShardLayout | None
) -> tuple[ReceiveLink, bytes]:
    """``Transport.accept``, of a pair of ranks. Raises HandoffError where it carries none."""
    if shard is None:
        return transport.accept(peer, offer)
    return _sharding(transport).accept(peer, offer, shard)


def connect_shard(
    transport: Transport, peer: Peer, answer: bytes, shard: ShardLayout | None
) -> SendLink:
    """``Transport.connect``, of a pair of ranks. Raises HandoffError where it carries none."""
    if shard is None:
        return transport.connect(peer, answer)
    return _sharding(transport).connect(peer, answer, shard)


def _sharding(transport: Transport) -> ShardingTransport:
    if isinstance(transport, ShardingTransport):
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


def damaged(number: int) -> ChecksumMismatch:
    """The error of a batch whose bytes are not those that its writer has."""
    return ChecksumMismatch(f"a part of batch {number} arrived damaged")
