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
from kvtransfer.transports.staging import Region
from kvtransfer.transports.transfer import Transfer


@dataclass(frozen=True, slots=True)
class Peer:
    """The worker, or rank of a worker, at the other end of a pair."""

    incarnation: str
    address: str
    """host:port of the peer's gRPC server, as this worker reaches it."""
    rank: int = 0
    """Number of the peer's rank."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The same part of several blocks: ``length`` bytes from ``offset`` of each."""

    blocks: tuple[int, ...]
    offset: int
    length: int

    @property
    def bytes(self) -> int:
        return len(self.blocks) * self.length


@dataclass(frozen=True, slots=True)
class Packed:
    """Parts of a batch that a writer has prepared, and can announce and send."""

    parts: Parts
    checksums: tuple[int, ...]
    """The ``kvtransfer.memory.checksum.checksum`` of each part. Empty if the transport
    ``encrypts``."""
    payload: Any = None
    """What the link's ``send`` needs in order to send the parts; each transport has its own
    form."""
    region: Region | None = None
    """Where the receiver reads the parts, if it does; it is kept until the batch has landed."""


@dataclass(frozen=True, slots=True)
class AnnouncedBatch:
    """A batch that a writer has announced to the receiver."""

    number: int
    """Number of the batch in its pair; numbers ascend in the order of sending."""
    source: Parts
    """Where the parts are in the writer's blocks."""
    target: Parts
    """Where the parts belong in this worker's blocks: as many blocks, and the same offset and
    length."""
    checksums: tuple[int, ...]
    """The writer's checksums of the parts. Empty if the transport ``encrypts``, and until they are
    known, if it ``reads_in_place``."""
    staged_at: int = 0
    """Offset of the batch in the writer's staging memory, if the receiver reads it there."""


class SendLink(Protocol):
    """The writer's end of a transport's connection to one receiver."""

    def pack(self, number: int, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """Prepare the parts of batch ``number`` for sending. It blocks while it reads them, so call
        it on a transfer thread.

        The parts must be complete, and stay unchanged until the batch has arrived. ``memory`` holds
        their blocks: the registered memory by default, or any other if the transport
        ``copies_out``. Raises HandoffError for parts that the memory does not have, and
        WorkerFailed if there is no room for them in time.
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
    """The receiver's end of a transport's connection to one writer."""

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
    """One way to move blocks between this worker process and others. The event loop calls it."""

    @property
    def name(self) -> str:
        """Name of the transport in ``--transport`` and the metrics."""

    @property
    def part_bytes(self) -> int:
        """Size of the largest part, in bytes, that suits this transport."""

    @property
    def batch_bytes(self) -> int:
        """Largest batch, in bytes, that suits this transport: at least ``part_bytes``."""

    @property
    def copies_out(self) -> bool:
        """Whether ``pack`` copies the parts, so that memory other than the registered one may be
        sent."""

    @property
    def reads_in_place(self) -> bool:
        """Whether the receiver reads the writer's blocks in place.

        ``receive`` then needs no checksums: the transfer computes them (``found``), and they are
        compared when the writer's are known.
        """

    @property
    def encrypts(self) -> bool:
        """Whether parts are encrypted and authenticated on their way, so that they need no
        checksums (``kvtransfer.transports.encryption``)."""

    @property
    def staging_bytes(self) -> int:
        """Number of bytes of the memory that holds data between blocks and wire at present."""

    def register(self, memory: BlockMemory) -> None:
        """Prepare the worker's blocks for this transport; called once, first.

        Raises ConfigError, with what is missing, if this machine cannot do it.
        """

    def offer(self) -> bytes:
        """Return the data by which a peer decides whether both can use this transport, and
        connects."""

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
        """Always true: the links of this transport can carry shards."""

    def accept(
        self, peer: Peer, offer: bytes, shard: ShardLayout | None = None
    ) -> tuple[ReceiveLink, bytes]:
        """Start to receive from a writer. With a ``shard`` that is not whole, parts consist of its
        packed bytes. See ``Transport``."""

    def connect(self, peer: Peer, answer: bytes, shard: ShardLayout | None = None) -> SendLink:
        """Connect to a receiver that has accepted. With a ``shard`` that is not whole, parts
        consist of its packed bytes. See ``Transport``."""


def accept_shard(
    transport: Transport, peer: Peer, offer: bytes, shard: ShardLayout | None
) -> tuple[ReceiveLink, bytes]:
    """Call ``Transport.accept`` for a pair of ranks.

    Raises HandoffError if a shard is to be sent and the transport carries none.
    """
    if shard is None:
        return transport.accept(peer, offer)
    return _sharding(transport).accept(peer, offer, shard)


def connect_shard(
    transport: Transport, peer: Peer, answer: bytes, shard: ShardLayout | None
) -> SendLink:
    """Call ``Transport.connect`` for a pair of ranks.

    Raises HandoffError if a shard is to be sent and the transport carries none.
    """
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
    """Write parts of a batch, from number ``first`` on, to their blocks; the data of each begins at
    one of ``starts``.

    Returns the checksums of the parts. Raises ChecksumMismatch if one differs from the
    announced one.
    """
    parts, count = batch.target, len(starts)
    blocks = parts.blocks[first : first + count]
    found = memory.write_many(blocks, parts.offset, parts.length, source, starts)
    if batch.checksums and found != batch.checksums[first : first + count]:
        raise damaged(batch.number)
    return found


def damaged(number: int) -> ChecksumMismatch:
    """Return the error of batch ``number``, whose bytes differ from the writer's."""
    return ChecksumMismatch(f"a part of batch {number} arrived damaged")
