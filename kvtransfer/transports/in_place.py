"""Transports on which the receiver reads the writer's blocks in place.

Both ends are on one host. Their offers, which are JSON, contain the host and how other processes
can open their blocks. The writer has nothing to send: it computes checksums of its parts, and keeps
the parts unchanged until they have arrived. The receiver opens the writer's blocks and copies from
them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError, HandoffError, WorkerFailed
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.memory.seal_board import SealBoard
from kvtransfer.transports.transfer import OpenTransfers, Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts, damaged

Offer = TypeVar("Offer")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PID_NAMESPACE = Path("/proc/self/ns/pid")
_TYPES: dict[str, type] = {"str": str, "int": int}


def read_offer(kind: type[Offer], data: bytes, transport: str) -> Offer:
    """Parse an offer into ``kind``, a dataclass whose fields are ``str`` and non-negative ``int``.

    Fields that ``kind`` lacks are ignored: a newer peer may have more. Raises HandoffError for
    anything else: a peer's pid becomes part of a path, and its sizes become bounds.
    """
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    try:
        told = json.loads(data)
        offer = kind(**{name: value for name, value in told.items() if name in known})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise HandoffError(f"the offer of transport {transport} cannot be read") from error
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(offer)  # type: ignore[arg-type]
    for field in fields:
        value = getattr(offer, field.name)
        if type(value) is not _TYPES[str(field.type)]:
            raise HandoffError(f"the offer of transport {transport} cannot be read: {field.name}")
        if type(value) is int and value < 0:
            raise HandoffError(
                f"the offer of transport {transport} has an invalid value: {field.name}"
            )
    return offer


def host_of(transport: str) -> tuple[str, str]:
    """Return this host's boot ID, and the ID of the process namespace. The namespace usually
    differs in each container.

    Raises ConfigError, which names ``transport``, if the system does not provide them.
    """
    try:
        return _host()
    except OSError as error:
        raise ConfigError(
            f"transport {transport} cannot identify the host and process namespace: {error}"
        ) from error


@functools.cache
def _host() -> tuple[str, str]:
    # Read once, when the transport starts: a process may be out of descriptors later.
    return _BOOT_ID.read_text().strip(), os.readlink(_PID_NAMESPACE)


def are_on_two_hosts(offer: bytes, other: bytes) -> bool:
    """Whether two offers of a transport come from different hosts. False if one of the offers names
    no host."""
    hosts = [_boot_id(each) for each in (offer, other)]
    return None not in hosts and hosts[0] != hosts[1]


def _boot_id(offer: bytes) -> object:
    try:
        return json.loads(offer).get("boot_id")
    except (ValueError, AttributeError, RecursionError):
        return None


class ReadSendLink:
    """Implements ``SendLink`` without sending, because the receiver reads the blocks in place."""

    def __init__(self, memory: BlockMemory, board: SealBoard | None = None) -> None:
        """``board`` is read by the receiver. Without it, checksums are sent in messages."""
        self.board = board
        self._memory = memory
        self._transfers = OpenTransfers()

    def pack(self, number: int, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """Compute the checksums of parts of blocks; the parts are not copied. See ``SendLink``."""
        assert memory is None or memory is self._memory, "the receiver cannot read other memory"
        sums = self._memory.checksum_many(parts.blocks, parts.offset, parts.length)
        return Packed(parts, sums)

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        """Return a transfer that is over already, because the receiver reads the blocks in place.
        See ``SendLink``."""
        transfer = self._transfers.new()
        transfer.finish()
        return transfer

    def close(self) -> None:
        """Fail transfers that are made from now on; idempotent. See ``SendLink``."""
        self._transfers.end(WorkerFailed("the pair was closed"))


class Copier(Protocol):
    """Copies parts of a writer's blocks, which it has opened, into this worker's blocks."""

    @property
    def blocks(self) -> int:
        """Number of the writer's blocks."""

    @property
    def part_end(self) -> int:
        """Offset within a block, in bytes, beyond which no part may extend."""

    def copy(self, batch: AnnouncedBatch) -> tuple[int, ...]:
        """Copy a batch into this worker's blocks, on a thread of the executor. The writer must have
        its parts.

        Returns the checksums of the written bytes; all of them have arrived then. Raises
        HandoffError for targets that this worker does not have.
        """


C = TypeVar("C", bound=Copier)


class ReadReceiveLink(Generic[C]):
    """Implements ``ReceiveLink`` where the receiver reads the writer's blocks."""

    def __init__(
        self, copier: C, executor: Executor, file: npt.NDArray[np.uint8] | None = None
    ) -> None:
        """``executor`` runs the copies; each of its threads copies one batch at a time. ``file`` is
        the writer's shared file, uint8 [bytes], if it may have a board for checksums."""
        self.file = file
        self._copier: C | None = copier
        """The open copier; None once the link is closed, so that the writer's blocks do not stay
        mapped."""
        self._executor = executor
        self._transfers = OpenTransfers()

    def receive(self, batch: AnnouncedBatch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        """Start to bring a batch into its target blocks. A copy takes no longer than moving its
        bytes, so ``deadline_s`` is not needed. See ``ReceiveLink``."""
        transfer = self._transfers.new()
        copier = self._copier
        if copier is None or not wanted:
            transfer.cancel()
        elif not _is_inside(batch, copier):
            transfer.fail(HandoffError(f"batch {batch.number} lies outside its writer's blocks"))
        else:
            try:
                self._executor.submit(_copy, copier, batch, transfer)
            except RuntimeError:
                transfer.fail(WorkerFailed("this worker is stopping"))
        return transfer

    def close(self) -> None:
        """End every transfer and disconnect; idempotent. The writer's blocks are unmapped after the
        last copy from them. See ``ReceiveLink``."""
        self._transfers.end(WorkerFailed("the pair was closed"))
        copier, self._copier = self._copier, None
        self.file = None
        if copier is not None:
            self._let_go(copier)

    def _let_go(self, copier: C) -> None:
        """Release the writer's blocks after the copies that still run have ended. No other copy
        begins."""


def _is_inside(batch: AnnouncedBatch, copier: Copier) -> bool:
    """Whether the writer has the parts of blocks that a batch names. The check is needed because
    the peer names the parts."""
    source, target = batch.source, batch.target
    return (
        min(source.blocks) >= 0
        and max(source.blocks) < copier.blocks
        and 0 <= source.offset < source.offset + source.length <= copier.part_end
        and (source.offset, source.length) == (target.offset, target.length)
    )


def _copy(copier: Copier, batch: AnnouncedBatch, transfer: Transfer) -> None:
    if not transfer.begin():
        return
    try:
        found = copier.copy(batch)
        if batch.checksums and found != batch.checksums:
            raise damaged(batch.number)
    except Exception as error:
        transfer.fail(error)
    else:
        transfer.found = () if batch.checksums else found
        transfer.finish()
