"""The cuda_ipc transport: two processes of one host whose GPUs are one, or reach each other.

A writer lets others open its blocks; the receiver copies from there into its own with one kernel
that also sums up. A writer has no path to a receiver's blocks. What the receiver reads stays as it
is because the writer keeps it so until the batch has landed; the checksums tell if it does not.

Not run on a GPU yet.
"""

from __future__ import annotations

import base64
import json
import os
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakSet

from baton.errors import ConfigError, HandoffError, WorkerFailed
from kvtransfer.links import OpenTransfers, ReadSendLink, damaged
from kvtransfer.memory import BlockMemory
from kvtransfer.memory import check_part as check_place
from kvtransfer.offer import read_offer
from kvtransfer.transfer import Transfer
from kvtransfer.transport import Batch, Peer

if TYPE_CHECKING:
    from kvtransfer.cuda_ipc import OpenedMemory

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_HANDLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Offer:
    """Where a writer's blocks can be opened from, and on which host."""

    boot_id: str
    pid: int
    device: str
    """The GPU's UUID."""
    handle: str
    """In base64."""
    offset: int
    blocks: int
    block_bytes: int


class CudaIpcTransport:
    """Implements ``kvtransfer.transport.Transport``."""

    name = "cuda_ipc"
    part_bytes = 64 << 20
    batch_bytes = 64 << 20
    copies_out = False
    reads_in_place = True
    staging_bytes = 0

    def __init__(self, executor: Executor) -> None:
        """``executor`` copies: each of its threads a batch at a time."""
        self._executor = executor
        self._memory: BlockMemory | None = None
        self._device = 0
        self._offer = b""
        self._links: WeakSet[ReadSendLink | CudaIpcReceiveLink] = WeakSet()

    def register(self, memory: BlockMemory) -> None:
        """See ``Transport``."""
        kind, _, number = memory.device.partition(":")
        if kind != "cuda":
            raise ConfigError(f"transport cuda_ipc needs KV blocks on a GPU: they are on {kind}")
        from kvtransfer import cuda_ipc  # noqa: PLC0415

        exported = cuda_ipc.export(memory.address, int(number))
        offer = _Offer(
            boot_id=_host(),
            pid=os.getpid(),
            device=cuda_ipc.device_name(int(number)),
            handle=base64.b64encode(exported.handle).decode(),
            offset=exported.offset,
            blocks=memory.blocks,
            block_bytes=memory.block_bytes,
        )
        self._offer = json.dumps(asdict(offer)).encode()
        self._memory, self._device = memory, int(number)

    def offer(self) -> bytes:
        """See ``Transport``."""
        return self._offer

    def accept(self, peer: Peer, offer: bytes) -> tuple[CudaIpcReceiveLink, bytes]:
        """See ``Transport``. Opening takes some milliseconds."""
        assert self._memory is not None, "not registered"
        theirs = _parse(offer)
        if theirs.boot_id != _host():
            raise HandoffError(f"{peer.incarnation} is on another host")
        if theirs.pid == os.getpid():
            raise HandoffError(f"{peer.incarnation} is this very process, which CUDA refuses")
        from kvtransfer import cuda_ipc  # noqa: PLC0415

        device = cuda_ipc.find_device(theirs.device, self._device)
        if device is None:
            raise HandoffError(f"the GPU of {peer.incarnation} cannot be reached from this one")
        exported = cuda_ipc.ExportedMemory(base64.b64decode(theirs.handle), theirs.offset)
        size = theirs.blocks * theirs.block_bytes
        opened = cuda_ipc.OpenedMemory(exported, size, device)
        copier = _Copier(self._memory, self._device, opened, theirs.block_bytes)
        link = CudaIpcReceiveLink(copier, theirs, self._executor)
        self._links.add(link)
        return link, b""

    def connect(self, peer: Peer, answer: bytes) -> ReadSendLink:
        """See ``Transport``."""
        assert self._memory is not None, "not registered"
        link = ReadSendLink(self._memory)
        self._links.add(link)
        return link

    def close(self) -> None:
        """See ``Transport``. The memory belongs to the worker."""
        for link in list(self._links):
            link.close()


class _Copier:
    """Copies parts of a writer's opened blocks into this worker's."""

    def __init__(
        self, memory: BlockMemory, device: int, theirs: OpenedMemory, block_bytes: int
    ) -> None:
        import torch  # noqa: PLC0415

        from kvtransfer.checksum_triton import copy_tensor  # noqa: PLC0415
        from kvtransfer.cuda_ipc import tensor_at  # noqa: PLC0415

        self._memory = memory
        self._theirs = theirs
        self._their_block_bytes = block_bytes
        size = memory.blocks * memory.block_bytes
        self._ours = tensor_at(memory.address, size, device).view(memory.blocks, -1)
        self._copy_tensor = copy_tensor
        # Of its own: on the default stream a copy would wait for the engine's steps.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._on_stream = torch.cuda.stream
        # A copy between two GPUs makes torch open the way from one to the other, for kernels too.
        torch.empty(1, dtype=torch.uint8, device=self._ours.device).copy_(theirs.bytes[:1])

    def copy(self, source: int, target: int, offset: int, length: int) -> int:
        """Copy a part. Returns the checksum of what was written, which then has arrived.

        Raises HandoffError where this worker has no such part.
        """
        check_place(self._memory, target, offset, length)
        start = source * self._their_block_bytes + offset
        there = self._theirs.bytes[start : start + length]
        here = self._ours[target, offset : offset + length]
        with self._on_stream(self._stream):
            if length % 8 == 0 and offset % 4 == 0:
                return self._copy_tensor(here, there)
            here.copy_(there)
        self._stream.synchronize()
        return self._memory.checksum(target, offset, length)


class CudaIpcReceiveLink:
    """Implements ``ReceiveLink``."""

    def __init__(self, copier: _Copier, theirs: _Offer, executor: Executor) -> None:
        self._copier = copier
        self._theirs = theirs
        self._executor = executor
        self._transfers = OpenTransfers()

    def receive(self, batch: Batch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        """See ``ReceiveLink``. A copy takes no longer than its bytes do."""
        transfer = self._transfers.new()
        if not wanted:
            transfer.cancel()
            return transfer
        if not self._sound(batch):
            transfer.fail(HandoffError(f"batch {batch.number} lies outside its writer's blocks"))
            return transfer
        try:
            self._executor.submit(self._copy, batch, transfer)
        except RuntimeError:
            transfer.fail(WorkerFailed("this worker is stopping"))
        return transfer

    def _sound(self, batch: Batch) -> bool:
        """Peers name parts, and may be wrong."""
        source, target = batch.source, batch.target
        end = source.offset + source.length
        return (
            all(0 <= block < self._theirs.blocks for block in source.blocks)
            and 0 <= source.offset < end <= self._theirs.block_bytes
            and (source.offset, source.length) == (target.offset, target.length)
        )

    def _copy(self, batch: Batch, transfer: Transfer) -> None:
        if not transfer.begin():
            return
        try:
            offset, length = batch.target.offset, batch.target.length
            found = tuple(
                self._copier.copy(source, target, offset, length)
                for source, target in zip(batch.source.blocks, batch.target.blocks, strict=True)
            )
            if batch.checksums and found != batch.checksums:
                raise damaged(batch.number)
        except Exception as error:
            transfer.fail(error)
        else:
            transfer.found = () if batch.checksums else found
            transfer.finish()

    def close(self) -> None:
        """See ``ReceiveLink``. What was opened is closed after the last copy that reads it."""
        self._transfers.end(WorkerFailed("the pair was closed"))


def _host() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError as error:
        raise ConfigError(f"transport cuda_ipc cannot tell which host this is: {error}") from error


def _parse(offer: bytes) -> _Offer:
    """Raises HandoffError."""
    theirs = read_offer(_Offer, offer, "cuda_ipc")
    try:
        handle = base64.b64decode(theirs.handle, validate=True)
        sizes = (theirs.offset + 1, theirs.blocks, theirs.block_bytes)
        sound = len(handle) == _HANDLE_BYTES and all(size > 0 for size in sizes)
    except (ValueError, TypeError, RecursionError) as error:
        raise HandoffError("the offer of transport cuda_ipc cannot be read") from error
    if not sound:
        raise HandoffError("the offer of transport cuda_ipc makes no sense")
    return theirs
