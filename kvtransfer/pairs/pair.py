"""What the two ends of a pair agree on."""

from __future__ import annotations

import asyncio
import zlib
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
    """A worker as its peers know it."""

    incarnation: str
    fingerprint: str
    geometry: Geometry
    rank: int = 0
    """Which rank of that worker."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"{self.incarnation} rank {self.rank}" if self.rank else self.incarnation


@dataclass(frozen=True, slots=True)
class PairLimits:
    """What bounds the pairs of a worker."""

    window_bytes: int = 32 << 20
    """Most bytes of a pair that are announced and have not landed."""
    silence_s: float = 3.0
    """A peer that owes an answer and is silent for this long is given up."""
    batch_deadline_s: float = 30.0
    """A batch that has not landed by then ends its pair."""


def shard_between(writer: Identity, receiver: Identity) -> ShardLayout | None:
    """What the writer's rank gives the receiver's; None between two workers of one rank each.

    Raises HandoffError where that is nothing, or where a worker has no such rank.
    """
    source, target = KvLayout.of(writer.geometry), KvLayout.of(receiver.geometry)
    if source.tensor_parallel == target.tensor_parallel == 1 and writer.rank == receiver.rank == 0:
        return None
    for layout, rank in ((source, writer.rank), (target, receiver.rank)):
        if not 0 <= rank < layout.tensor_parallel:
            raise HandoffError(f"there is no rank {rank} of {layout.tensor_parallel}")
    return shard_of(source, target, writer.rank, receiver.rank)


def check_peer(own: Identity, peer: Identity, meant: str) -> Fit:
    """Whether ``peer`` may exchange blocks with the life ``meant`` of this worker, and how.

    The fingerprint comes first. Raises HandoffError, and names both sides.
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
        raise HandoffError(f"{meant} is gone; here is {own.incarnation}")
    return fit


Message = TypeVar("Message", transfer_pb2.TransferRequest, transfer_pb2.TransferResponse)


async def all_at_once(queue: asyncio.Queue[Message]) -> Message:
    """Whatever there is to say, in one message; waits until there is something.

    A message costs some 0.2 ms on its way, whatever it holds.
    """
    message = await queue.get()
    while not queue.empty():
        message.MergeFrom(queue.get_nowait())
    return message


# Odd, so that every bit of what they multiply counts; digits of pi after the point.
_TICKET_FACTOR, _BLOCK_FACTOR = 0x243F6A8885A308D3, 0x13198A2E03707345
_OFFSET_FACTOR = 0xA4093822299F31D1
_MASK64 = (1 << 64) - 1


def segment_checksum(digest: int, ticket_id: str, block_index: int, offset: int) -> int:
    """Bind a segment's ``checksum`` to its place, so that it cannot pass for another's."""
    place = _ticket_place(ticket_id) + (block_index + 1) * _BLOCK_FACTOR + offset * _OFFSET_FACTOR
    return (digest + place) & _MASK64


@lru_cache(maxsize=1024)
def _ticket_place(ticket_id: str) -> int:
    return zlib.crc32(ticket_id.encode()) * _TICKET_FACTOR


def raw_checksum(sealed: int, ticket_id: str, block_index: int, offset: int) -> int:
    """The ``checksum`` that ``segment_checksum`` was made of, for the same place."""
    return (sealed - segment_checksum(0, ticket_id, block_index, offset)) & _MASK64
