"""What a transport is: one way of bringing parts of KV blocks from a writer to a receiver.

A writer and a receiver form a *pair*, one direction of two worker processes. What they say to each
other (tickets, batches, acknowledgements) goes over the pair's own gRPC stream; a transport moves
the bytes alone:

    writer                                    receiver
    Transport.register() → offer  ─────────►  Transport.accept(offer) → ReceiveLink, answer
    Transport.connect(answer) → SendLink  ◄─
    SendLink.pack(batch) → Packed ─announces─►  ReceiveLink.receive(batch) → Transfer
    SendLink.send(packed) → Transfer ══bytes══►   (verified, in place)

On every transport it is the receiver that writes into its blocks, after its event loop has let
it: a writer that was stopped and wakes later finds no way to them. A batch that was announced is
sent, or its link is closed: so both ends agree on what comes next.

Links and transfers are safe among threads. Nothing here waits without a deadline.
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
    """Which rank of that worker."""


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
    """``kvtransfer.memory.checksum.checksum`` of each part."""
    payload: Any = None
    """What the link keeps of them until they are sent."""


@dataclass(frozen=True, slots=True)
class AnnouncedBatch:
    """Parts as the receiver is told of them."""

    number: int
    """Ascends within the pair, in the order in which batches are sent."""
    source: Parts
    """Where they are at the writer."""
    target: Parts
    """Where they belong here: as many blocks, the same offset and length."""
    checksums: tuple[int, ...]
    """None while they are not known, where the transport ``reads_in_place``."""


class SendLink(Protocol):
    """A writer's end."""

    def pack(self, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """Make parts ready. Blocks for as long as reading them takes: for a transfer thread.

        The parts must be complete, and stay as they are until the batch has landed. ``memory`` is
        that which was registered, or any other where the transport ``copies_out``.
        """

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        """Begin to send a batch that has been announced. Never blocks.

        The transfer is done when the payload is needed no longer; that the bytes have landed, the
        receiver says. It fails with WorkerFailed when the peer is gone, and DeadlineExceeded where
        the transport itself waits for longer than ``deadline_s`` seconds (the pair watches what has
        not landed in any case); the link is of no more use then.
        """

    def close(self) -> None:
        """End every transfer with WorkerFailed and let the peer go. Never blocks; idempotent."""


class ReceiveLink(Protocol):
    """A receiver's end."""

    def receive(self, batch: AnnouncedBatch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        """Begin to bring a batch into its target blocks. Never blocks. In the order of numbers.

        What is not ``wanted`` is dropped when it comes: its transfer is cancelled from the start.

        The transfer is done when every part is in place and its checksum was found right. It fails
        with ChecksumMismatch for a damaged part, WorkerFailed when the peer is gone, and
        DeadlineExceeded as ``SendLink.send``. Once it is done, failed or cancelled, nothing
        writes into the target blocks any more.
        """

    def close(self) -> None:
        """End every transfer with WorkerFailed and let the peer go. Never blocks; idempotent."""


class Transport(Protocol):
    """One way of moving bytes, of one worker process. Used by its event loop."""

    @property
    def name(self) -> str:
        """As ``--transport`` and the metrics call it."""

    @property
    def part_bytes(self) -> int:
        """Most bytes of one part that suit it."""

    @property
    def batch_bytes(self) -> int:
        """Most bytes of one batch that suit it: at least ``part_bytes``."""

    @property
    def copies_out(self) -> bool:
        """Whether ``pack`` copies: then other memory than the registered one may be sent."""

    @property
    def reads_in_place(self) -> bool:
        """Whether the receiver reads the writer's blocks where they lie, so that ``receive`` needs

        no checksums: the transfer tells those that it ``found`` then, and they are compared when
        the writer's are known.
        """

    @property
    def staging_bytes(self) -> int:
        """Memory that it holds for bytes between blocks and wire, at this moment."""

    def register(self, memory: BlockMemory) -> None:
        """Make the worker's blocks ready for this transport; called once, first.

        Raises ConfigError where this machine cannot do it, and says what is missing.
        """

    def offer(self) -> bytes:
        """What a peer must know to judge whether both can use this transport, and to connect."""

    def accept(self, peer: Peer, offer: bytes) -> tuple[ReceiveLink, bytes]:
        """Receive from a writer; what it must know to connect. Never blocks.

        Raises HandoffError where the two cannot reach each other this way.
        """

    def connect(self, peer: Peer, answer: bytes) -> SendLink:
        """Send to a receiver that has accepted. Never blocks. Raises HandoffError."""

    def close(self) -> None:
        """Close all links and give back what ``register`` took; idempotent."""


@runtime_checkable
class ShardingTransport(Transport, Protocol):
    """One that also carries shards: the heads that ranks of unequal workers have in common."""

    @property
    def carries_shards(self) -> bool:
        """That it does."""

    def accept(
        self, peer: Peer, offer: bytes, shard: ShardLayout | None = None
    ) -> tuple[ReceiveLink, bytes]:
        """See ``Transport``. With a ``shard`` that is not whole, parts are of its packed bytes."""

    def connect(self, peer: Peer, answer: bytes, shard: ShardLayout | None = None) -> SendLink:
        """See ``Transport``. With a ``shard`` that is not whole, parts are of its packed bytes."""


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


def place(
    memory: BlockMemory,
    batch: AnnouncedBatch,
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
