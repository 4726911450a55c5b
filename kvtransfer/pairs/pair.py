"""Definitions that both ends of a pair share."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from baton.errors import FingerprintMismatch, GeometryMismatch, HandoffError
from baton.request import Geometry
from baton.v1 import transfer_pb2
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.shard_layout import ShardLayout, shard_of
from kvtransfer.pairs.negotiation import Fit, check_geometry


@dataclass(frozen=True, slots=True)
class Identity:
    """How a worker identifies itself to peers."""

    incarnation: str
    fingerprint: str
    geometry: Geometry
    rank: int = 0
    """Number of the rank within its worker."""

    @property
    def name(self) -> str:
        """Name of the worker, or of its rank, for log and error messages."""
        return f"{self.incarnation} rank {self.rank}" if self.rank else self.incarnation


@dataclass(frozen=True, slots=True)
class PairLimits:
    """Limits of each pair of a worker: bytes in flight, silence, and time for a batch."""

    window_bytes: int = 32 << 20
    """Maximum bytes of a pair that are announced and have not arrived."""
    silence_s: float = 3.0
    """Seconds of silence after which a peer that owes an answer counts as lost."""
    batch_deadline_s: float = 30.0
    """Seconds within which an announced batch must arrive; otherwise its pair ends."""


def shard_between(writer: Identity, receiver: Identity) -> ShardLayout | None:
    """Return the heads that the writer's rank sends to the receiver's rank, as a layout. Returns
    None if both workers have one rank.

    Raises HandoffError if the two ranks have no head in common, or if a worker has no such rank.
    """
    source, target = KvLayout.of(writer.geometry), KvLayout.of(receiver.geometry)
    if source.tensor_parallel == target.tensor_parallel == 1 and writer.rank == receiver.rank == 0:
        return None
    for layout, rank in ((source, writer.rank), (target, receiver.rank)):
        if not 0 <= rank < layout.tensor_parallel:
            raise HandoffError(f"there is no rank {rank} of {layout.tensor_parallel}")
    return shard_of(source, target, writer.rank, receiver.rank)


def check_peer(own: Identity, peer: Identity, meant: str) -> Fit:
    """Check whether and how worker ``peer`` may exchange blocks with this worker (``own``).

    ``meant`` is the incarnation of this worker that the peer has addressed. The fingerprint is
    checked first. Raises HandoffError, with the values of both workers.
    """
    if peer.fingerprint != own.fingerprint:
        raise FingerprintMismatch(
            f"{peer.incarnation} serves {peer.fingerprint}, "
            f"{own.incarnation} serves {own.fingerprint}"
        )
    try:
        fit = check_geometry(peer.geometry, own.geometry)
    except GeometryMismatch as error:
        raise GeometryMismatch(
            f"{peer.incarnation} has {peer.geometry}, {own.incarnation} has {own.geometry}: "
            "these cannot be converted"
        ) from error
    if meant != own.incarnation:
        raise HandoffError(f"{meant} is gone; this worker is {own.incarnation}")
    return fit


Message = TypeVar("Message", transfer_pb2.TransferRequest, transfer_pb2.TransferResponse)


async def all_at_once(queue: asyncio.Queue[Message]) -> Message:
    """Return all queued messages merged into one; waits for the first message.

    Sending a message takes some 0.2 ms, whatever it contains. A caller that sends the result at
    once has begun to do so before ``queue.join`` returns elsewhere.
    """
    message = await queue.get()
    queue.task_done()
    while not queue.empty():
        message.MergeFrom(queue.get_nowait())
        queue.task_done()
    return message


# Odd, so that every bit of the other factor counts; digits of pi after the point.
_TICKET_FACTOR, _BLOCK_FACTOR = 0x243F6A8885A308D3, 0x13198A2E03707345
_OFFSET_FACTOR = 0xA4093822299F31D1
_MASK64 = (1 << 64) - 1


def seal_checksums(
    checksums: Sequence[int], ticket_id: str, blocks: Sequence[int], offset: int
) -> tuple[int, ...]:
    """Combine the checksums of segments at ``offset`` of some missing blocks with their places:
    ticket, block and offset. So one segment cannot be mistaken for another.
    """
    start = _place(ticket_id, offset)
    return tuple(
        (checksum + start + block * _BLOCK_FACTOR) & _MASK64
        for checksum, block in zip(checksums, blocks, strict=True)
    )


def unseal_checksums(
    sealed: Sequence[int], ticket_id: str, blocks: Sequence[int], offset: int
) -> tuple[int, ...]:
    """Undo ``seal_checksums``: return the checksums of the bytes alone."""
    start = _place(ticket_id, offset)
    return tuple(
        (checksum - start - block * _BLOCK_FACTOR) & _MASK64
        for checksum, block in zip(sealed, blocks, strict=True)
    )


@lru_cache(maxsize=1024)
def _place(ticket_id: str, offset: int) -> int:
    ticket = zlib.crc32(ticket_id.encode()) * _TICKET_FACTOR
    return ticket + _BLOCK_FACTOR + offset * _OFFSET_FACTOR
