"""The shared-memory transport: two processes of one host, one copy, nobody in between.

Every worker's blocks lie in a file without a name that others can map. The receiver maps the
writer's, to read only, and copies from it into its own blocks, checking as it copies. So a writer
has no path to a receiver's blocks at all: one that was stopped and wakes later finds nothing to
spoil, and one that is killed leaves its memory to those who have it mapped.

What the receiver reads stays as it is because the writer keeps it so until the batch has landed; if
it should not, the checksums tell.
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from weakref import WeakSet

import numpy as np

from baton.errors import ConfigError, HandoffError, WorkerFailed
from kvtransfer.layout.share_layout import ShareLayout
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.memory.share_memory import PeerBlocks, Pieces, ShareMemory, source_memory
from kvtransfer.memory.shared_pool import open_shared
from kvtransfer.transports.links import OpenTransfers, ReadSendLink, place
from kvtransfer.transports.offer import host_of, read_offer
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import Batch, Peer


@dataclass(frozen=True, slots=True)
class _Offer:
    """Where a writer's blocks can be mapped from, and on which host."""

    boot_id: str
    pid_namespace: str
    pid: int
    descriptor: int
    inode: int
    bytes: int
    block_bytes: int


class ShmTransport:
    """Implements ``kvtransfer.transports.transport.Transport``."""

    name = "shm"
    part_bytes = 8 << 20
    batch_bytes = 16 << 20
    copies_out = False
    carries_shares = True
    reads_in_place = True
    staging_bytes = 0

    def __init__(self, executor: Executor) -> None:
        """``executor`` copies: each of its threads a batch at a time."""
        self._executor = executor
        self._memory: BlockMemory | None = None
        self._offer = b""
        self._links: WeakSet[ReadSendLink | ShmReceiveLink] = WeakSet()

    def register(self, memory: BlockMemory) -> None:
        """See ``Transport``."""
        shared = memory.shared_file
        if shared is None:
            raise ConfigError("transport shm needs the KV blocks in memory that others can map")
        self._memory = memory
        boot_id, pid_namespace = host_of(self.name)
        offer = _Offer(
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            pid=os.getpid(),
            descriptor=shared.descriptor,
            inode=os.fstat(shared.descriptor).st_ino,
            bytes=shared.bytes,
            block_bytes=memory.block_bytes,
        )
        self._offer = json.dumps(asdict(offer)).encode()

    def offer(self) -> bytes:
        """See ``Transport``."""
        return self._offer

    def accept(
        self, peer: Peer, offer: bytes, share: ShareLayout | None = None
    ) -> tuple[ShmReceiveLink, bytes]:
        """See ``SharingTransport``."""
        assert self._memory is not None, "not registered"
        theirs = _parse(offer)
        if (theirs.boot_id, theirs.pid_namespace) != host_of(self.name):
            raise HandoffError(f"{peer.incarnation} is on another host, or in another container")
        blocks = open_shared(theirs.pid, theirs.descriptor, theirs.inode, theirs.bytes)
        link: ShmReceiveLink
        if share is None or share.is_whole:
            link = ShmReceiveLink(self._memory, blocks.data, theirs.block_bytes, self._executor)
        elif theirs.block_bytes != share.source_block_bytes:
            raise HandoffError(
                f"{peer.incarnation} offers blocks of {theirs.block_bytes} bytes, and those of its "
                f"rank have {share.source_block_bytes}"
            )
        else:
            link = ShmShareLink(self._memory, blocks.data, share, self._executor)
        self._links.add(link)
        return link, b""

    def connect(self, peer: Peer, answer: bytes, share: ShareLayout | None = None) -> ReadSendLink:
        """See ``SharingTransport``."""
        assert self._memory is not None, "not registered"
        link = ReadSendLink(source_memory(self._memory, share))
        self._links.add(link)
        return link

    def close(self) -> None:
        """See ``Transport``. The memory belongs to the worker."""
        for link in list(self._links):
            link.close()


class ShmReceiveLink:
    """Implements ``ReceiveLink``."""

    def __init__(
        self, memory: BlockMemory, theirs: memoryview, block_bytes: int, executor: Executor
    ) -> None:
        self._memory = memory
        self._theirs = theirs
        """Empty once it is closed: whoever still refers to the link must not keep the mapping."""
        self._block_bytes = block_bytes
        self._part_end = block_bytes
        """Where the last part of a block ends at most."""
        self._executor = executor
        self._transfers = OpenTransfers()

    def receive(self, batch: Batch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        """See ``ReceiveLink``. A copy takes no longer than its bytes do."""
        transfer = self._transfers.new()
        if not wanted:
            transfer.cancel()
            return transfer
        source, theirs = batch.source, self._theirs
        last = (max(source.blocks) + 1) * self._block_bytes
        if source.offset + source.length > self._part_end or last > len(theirs):
            transfer.fail(HandoffError(f"batch {batch.number} lies outside its writer's blocks"))
            return transfer
        try:
            self._executor.submit(self._copy, batch, theirs, transfer)
        except RuntimeError:
            transfer.fail(WorkerFailed("this worker is stopping"))
        return transfer

    def _copy(self, batch: Batch, theirs: memoryview, transfer: Transfer) -> None:
        if not transfer.begin():
            return
        try:
            found = self._copy_parts(batch, theirs)
        except Exception as error:
            transfer.fail(error)
        else:
            transfer.found = () if batch.checksums else found
            transfer.finish()

    def _copy_parts(self, batch: Batch, theirs: memoryview) -> tuple[int, ...]:
        source = batch.source
        starts = [block * self._block_bytes + source.offset for block in source.blocks]
        return place(self._memory, batch, theirs, starts)

    def close(self) -> None:
        """See ``ReceiveLink``. The mapping goes with the last copy that reads it."""
        self._transfers.end(WorkerFailed("the pair was closed"))
        self._theirs = memoryview(b"")


class ShmShareLink(ShmReceiveLink):
    """Where a rank takes the heads that it has of a peer's blocks."""

    def __init__(
        self, memory: BlockMemory, theirs: memoryview, share: ShareLayout, executor: Executor
    ) -> None:
        super().__init__(memory, theirs, share.source_block_bytes, executor)
        self._packed = ShareMemory(memory, share.target_planes, share.block_bytes)
        self._part_end = share.block_bytes
        self._pieces = Pieces(share.source_planes)

    def _copy_parts(self, batch: Batch, theirs: memoryview) -> tuple[int, ...]:
        source, target = batch.source, batch.target
        peer = PeerBlocks(
            np.frombuffer(theirs, dtype=np.uint8), self._block_bytes, self._pieces, source.blocks
        )
        return self._packed.copy_from(target.blocks, target.offset, target.length, peer)


def _parse(offer: bytes) -> _Offer:
    """Raises HandoffError."""
    theirs = read_offer(_Offer, offer, "shm")
    if not theirs.block_bytes:
        raise HandoffError("the offer of transport shm makes no sense: block_bytes")
    return theirs
