"""The interface of a transport, which moves parts of KV blocks from a writer to a receiver.

A writer and a receiver form a *pair*, one direction of two worker processes. The pair's own gRPC
stream carries their messages (tickets, batches, acknowledgements); a transport moves only the
bytes:

    writer                                    receiver
    Transport.register() → offer  ─────────►  Transport.accept(offer) → ReceiveLink, answer
    Transport.connect(answer) → SendLink  ◄─
    SendLink.pack(batch) → Packed ─announces─►  ReceiveLink.receive(batch) → Transfer
    SendLink.send(packed) → Transfer ══bytes══►   (verified, in place)

On every transport, the receiver writes into its blocks, after its event loop has allowed it: a
writer that was stopped and wakes later has no path to them. A batch that was announced is sent, or
its link is closed. So both ends agree on what comes next.

Links and transfers are thread-safe. Nothing here waits without a deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from baton.errors import ChecksumMismatch, HandoffError
from kvtransfer.layout.shard_layout import ShardLayout
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Peer:
    """The other end of a pair."""

    incarnation: str
    address: str
    """host:port of its gRPC server, as this worker reaches it."""
    rank: int = 0
    """Number of the worker's rank."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The same part, ``length`` bytes from ``offset``, of some blocks."""

    blocks: tuple[int, ...]
    offset: int
    length: int

    @property
    def bytes(self) -> int:
        return len(self.blocks) * self.length


@dataclass(frozen=True, slots=True)
class Packed:
    """Parts that are ready to be announced."""

    parts: Parts
    checksums: tuple[int, ...]
    """The ``kvtransfer.memory.checksum.checksum`` of each part."""
    payload: Any = None
    """What the link needs to send them."""


@dataclass(frozen=True, slots=True)
class AnnouncedBatch:
    """Parts as the receiver gets them announced."""

    number: int
    """Number of the batch; ascends within the pair, in the order of sending."""
    source: Parts
    """Where the parts are at the writer."""
    target: Parts
    """Where they belong here: the same number of blocks, the same offset and length."""
    checksums: tuple[int, ...]
    """Checksums of the parts; empty until they are known, if the transport ``reads_in_place``."""


class SendLink(Protocol):
    """A writer's end."""

    def pack(self, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """Prepare parts. Blocks while it reads them, so call it on a transfer thread.

        The parts must be complete, and stay unchanged until the batch has arrived. ``memory`` is
        the registered memory, or any other if the transport ``copies_out``.
        """

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        """Start to send a batch that was announced. Never blocks.

        The transfer is done when the payload is no longer needed; the receiver reports the arrival
        of the bytes. It fails with WorkerFailed when the peer is gone, and with DeadlineExceeded if
        the transport itself waits for longer than ``deadline_s`` seconds. The pair also watches for
        batches that do not arrive. A link with a failed transfer is unusable.
        """

    def close(self) -> None:
        """End every transfer with WorkerFailed and disconnect. Never blocks; idempotent."""


class ReceiveLink(Protocol):
    """A receiver's end."""

    def receive(self, batch: AnnouncedBatch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        """Start to bring a batch into its target blocks, in the order of numbers. Never blocks.

        A batch that is not ``wanted`` is dropped when it arrives: its transfer is cancelled from
        the start.

        The transfer is done when every part is in place and its checksum was verified. It fails
        with ChecksumMismatch for a damaged part, WorkerFailed when the peer is gone, and
        DeadlineExceeded as in ``SendLink.send``. Once it is done, failed or cancelled, nothing
        writes into the target blocks any more.
        """

    def close(self) -> None:
        """End every transfer with WorkerFailed and disconnect. Never blocks; idempotent."""


class Transport(Protocol):
    """One way of moving bytes for one worker process. Its event loop uses it."""

    @property
    def name(self) -> str:
        """Name in ``--transport`` and the metrics."""

    @property
    def part_bytes(self) -> int:
        """Maximum suitable bytes of one part."""

    @property
    def batch_bytes(self) -> int:
        """Maximum suitable bytes of one batch: at least ``part_bytes``."""

    @property
    def copies_out(self) -> bool:
        """Whether ``pack`` copies, so that memory other than the registered one may be sent."""

    @property
    def reads_in_place(self) -> bool:
        """Whether the receiver reads the writer's blocks in place.

        ``receive`` then needs no checksums: the transfer provides those that it ``found``, and they
        are compared when the writer's are known.
        """

    @property
    def staging_bytes(self) -> int:
        """Memory that currently holds bytes between blocks and wire."""

    def register(self, memory: BlockMemory) -> None:
        """Prepare the worker's blocks for this transport; called once, first.

        Raises ConfigError, with what is missing, if this machine cannot do it.
        """

    def offer(self) -> bytes:
        """Data with which a peer decides whether both can use this transport, and connects."""

    def accept(self, peer: Peer, offer: bytes) -> tuple[ReceiveLink, bytes]:
        """Start to receive from a writer. Returns the link and the data to connect. Never blocks.

        Raises HandoffError if the two cannot reach each other this way.
        """

    def connect(self, peer: Peer, answer: bytes) -> SendLink:
        """Connect to a receiver that has accepted. Never blocks. Raises HandoffError."""

    def close(self) -> None:
        """Close all links and release what ``register`` has allocated; idempotent."""


@runtime_checkable
class ShardingTransport(Transport, Protocol):
    """A transport that also carries shards: the heads that ranks of different workers share."""

    @property
    def carries_shards(self) -> bool:
        """Always true."""

    def accept(
        self, peer: Peer, offer: bytes, shard: ShardLayout | None = None
    ) -> tuple[ReceiveLink, bytes]:
        """See ``Transport``. With a ``shard`` that is not whole, parts are of its packed bytes."""

    def connect(self, peer: Peer, answer: bytes, shard: ShardLayout | None = None) -> SendLink:
        """See ``Transport``. With a ``shard`` that is not whole, parts are of its packed bytes."""


def accept_shard(
    transport: Transport, peer: Peer, offer: bytes, shard: ShardLayout | None
) -> tuple[ReceiveLink, bytes]:
    """Call ``Transport.accept`` for a pair of ranks. Raises HandoffError if it carries no
    shards."""
    if shard is None:
        return transport.accept(peer, offer)
    return _sharding(transport).accept(peer, offer, shard)


def connect_shard(
    transport: Transport, peer: Peer, answer: bytes, shard: ShardLayout | None
) -> SendLink:
    """Call ``Transport.connect`` for a pair of ranks. Raises HandoffError if it carries no
    shards."""
    if shard is None:
        return transport.connect(peer, answer)
    return _sharding(transport).connect(peer, answer, shard)


def _sharding(transport: Transport) -> ShardingTransport:
    if isinstance(transport, ShardingTransport):
        return transport
    raise HandoffError(
        f"transport {transport.name} is for workers with one rank: workers with several exchange "
        "blocks by shm or grpc"
    )


def place(
    memory: BlockMemory,
    batch: AnnouncedBatch,
    source: memoryview,
    starts: Sequence[int],
    first: int = 0,
) -> tuple[int, ...]:
    """Write parts of a batch, from ``first`` on, to their blocks; their data is at ``starts``.

    Returns their checksums. Raises ChecksumMismatch if one differs from the announced checksum.
    """
    parts, count = batch.target, len(starts)
    blocks = parts.blocks[first : first + count]
    found = memory.write_many(blocks, parts.offset, parts.length, source, starts)
    if batch.checksums and found != batch.checksums[first : first + count]:
        raise damaged(batch.number)
    return found


def damaged(number: int) -> ChecksumMismatch:
    """The error of a batch whose bytes differ from the writer's."""
    return ChecksumMismatch(f"a part of batch {number} arrived damaged")
