"""The shared-memory transport: two processes of one host, with a single direct copy.

Every worker's blocks are in an unnamed file that others can map. The receiver maps the writer's
file read-only, copies from it into its own blocks, and checks while it copies. So a writer has no
path to a receiver's blocks: one that was stopped and wakes later cannot damage them. Processes that
have mapped the memory of a killed writer keep it.

The writer keeps what is read unchanged until the batch has arrived; the checksums detect a change.

The receiver opens the file through /proc, or, if the writer is in another container of the host,
through a socket in a folder that both have (``kvtransfer.memory.pool_socket``).
"""

from __future__ import annotations

import json
import os
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from pathlib import Path
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from baton.errors import ConfigError, HandoffError
from kvtransfer.layout.shard_layout import ShardLayout
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.memory.pool_socket import PoolSocket, fetch_shared
from kvtransfer.memory.seal_board import BOARD_BYTES, SealBoard
from kvtransfer.memory.shard_memory import PeerBlocks, Pieces, ShardMemory, source_memory
from kvtransfer.memory.shared_pool import inode_of, open_shared
from kvtransfer.transports.in_place import ReadReceiveLink, ReadSendLink, host_of, read_offer
from kvtransfer.transports.transport import AnnouncedBatch, Peer

_READS_BOARDS = b"board"
"""Answer of a receiver that finds checksums on the writer's board. Receivers of version 0.1 give an
empty answer, and wait for a message."""


@dataclass(frozen=True, slots=True)
class _Offer:
    """A writer's offer: its host, and how the receiver can map its blocks."""

    boot_id: str
    pid_namespace: str
    pid: int
    descriptor: int
    inode: int
    bytes: int
    block_bytes: int
    socket: str = ""
    """Name of the socket at which processes of other containers get the file; empty without one."""
    token: str = ""
    """What they show there."""


class ShmTransport:
    """Implements ``kvtransfer.transports.transport.Transport``."""

    name = "shm"
    part_bytes = 8 << 20
    batch_bytes = 256 << 20
    copies_out = False
    carries_shards = True
    reads_in_place = True
    encrypts = False
    staging_bytes = 0

    def __init__(self, executor: Executor, folder: str = "") -> None:
        """``executor`` runs the copies; each of its threads copies one batch at a time. ``folder``
        is shared with the containers of other workers on this host; empty: with none."""
        self._executor = executor
        self._folder = Path(folder) if folder else None
        self._socket: PoolSocket | None = None
        self._memory: BlockMemory | None = None
        self._offer = b""
        self._board: SealBoard | None = None
        self._links: WeakSet[ReadSendLink | ShmReceiveLink] = WeakSet()

    def register(self, memory: BlockMemory) -> None:
        """Prepare the worker's blocks for this transport. See ``Transport``."""
        shared = memory.shared_file
        if shared is None:
            raise ConfigError("transport shm needs the KV blocks in memory that others can map")
        self._memory = memory
        if shared.board is not None:
            self._board = SealBoard(shared.board, shared.bytes - BOARD_BYTES)
        boot_id, pid_namespace = host_of(self.name)
        offer = _Offer(
            boot_id=boot_id,
            pid_namespace=pid_namespace,
            pid=os.getpid(),
            descriptor=shared.descriptor,
            inode=inode_of(shared),
            bytes=shared.bytes,
            block_bytes=memory.block_bytes,
        )
        told = asdict(offer)
        if self._folder is not None:
            self._socket = PoolSocket(self._folder, shared)
            told |= {"socket": self._socket.name, "token": self._socket.token}
        else:
            # Workers of version 0.1 refuse fields that they do not know.
            del told["socket"], told["token"]
        self._offer = json.dumps(told).encode()

    def offer(self) -> bytes:
        """Return the data with which a peer decides whether it can use this transport. See
        ``Transport``."""
        return self._offer

    def accept(
        self, peer: Peer, offer: bytes, shard: ShardLayout | None = None
    ) -> tuple[ShmReceiveLink, bytes]:
        """Start to receive from a writer. See ``ShardingTransport``."""
        assert self._memory is not None, "not registered"
        theirs = _parse(offer)
        blocks = self._open(peer, theirs)
        copier: ShmCopier | ShmShardCopier
        if shard is None or shard.is_whole:
            copier = ShmCopier(self._memory, blocks.data, theirs.block_bytes)
        elif theirs.block_bytes != shard.source_block_bytes:
            raise HandoffError(
                f"{peer.incarnation} offers blocks of {theirs.block_bytes} bytes, and its "
                f"rank must have {shard.source_block_bytes}"
            )
        else:
            copier = ShmShardCopier(self._memory, blocks.data, shard)
        link = ShmReceiveLink(copier, self._executor, blocks)
        self._links.add(link)
        return link, _READS_BOARDS

    def _open(self, peer: Peer, theirs: _Offer) -> npt.NDArray[np.uint8]:
        boot_id, pid_namespace = host_of(self.name)
        if theirs.boot_id != boot_id:
            raise HandoffError(f"{peer.incarnation} is on another host")
        if theirs.pid_namespace == pid_namespace:
            return open_shared(theirs.pid, theirs.descriptor, theirs.inode, theirs.bytes)
        if self._folder is None or not theirs.socket:
            raise HandoffError(
                f"{peer.incarnation} is in another container of this host: set shm_folder for both"
            )
        return fetch_shared(self._folder, theirs.socket, theirs.token, theirs.inode, theirs.bytes)

    def connect(self, peer: Peer, answer: bytes, shard: ShardLayout | None = None) -> ReadSendLink:
        """Make the writer's end of the link. The writer sends no blocks, because the receiver reads
        them. See ``ShardingTransport``."""
        assert self._memory is not None, "not registered"
        board = self._board if answer == _READS_BOARDS else None
        link = ReadSendLink(source_memory(self._memory, shard), board)
        self._links.add(link)
        return link

    def close(self) -> None:
        """Close all links of this transport; idempotent. The blocks' memory is not released,
        because it belongs to the worker. See ``Transport``."""
        if self._socket is not None:
            self._socket.close()
        for link in list(self._links):
            link.close()


class ShmCopier:
    """Implements ``Copier`` for blocks that are sent whole."""

    def __init__(self, memory: BlockMemory, theirs: memoryview, block_bytes: int) -> None:
        """``theirs`` is the mapped memory of the writer's blocks. Each block has ``block_bytes``
        bytes."""
        self.blocks = len(theirs) // block_bytes
        self.part_end = block_bytes
        self._memory = memory
        self._theirs = theirs
        self._block_bytes = block_bytes

    def copy(self, batch: AnnouncedBatch) -> tuple[int, ...]:
        """Copy a batch into this worker's blocks. See ``Copier``."""
        source, target = batch.source, batch.target
        starts = [block * self._block_bytes + source.offset for block in source.blocks]
        return self._memory.write_many(
            target.blocks, target.offset, target.length, self._theirs, starts
        )


class ShmShardCopier:
    """Implements ``Copier`` for a shard: copies only those heads of the writer's blocks that this
    rank needs."""

    def __init__(self, memory: BlockMemory, theirs: memoryview, shard: ShardLayout) -> None:
        self.blocks = len(theirs) // shard.source_block_bytes
        self.part_end = shard.block_bytes
        self._packed = ShardMemory(memory, shard.target_planes, shard.block_bytes)
        self._theirs = np.frombuffer(theirs, dtype=np.uint8)
        self._block_bytes = shard.source_block_bytes
        self._pieces = Pieces(shard.source_planes)

    def copy(self, batch: AnnouncedBatch) -> tuple[int, ...]:
        """Copy a batch into this worker's blocks. See ``Copier``."""
        source, target = batch.source, batch.target
        peer = PeerBlocks(self._theirs, self._block_bytes, self._pieces, source.blocks)
        return self._packed.copy_from(target.blocks, target.offset, target.length, peer)


class ShmReceiveLink(ReadReceiveLink[ShmCopier | ShmShardCopier]):
    """A link that unmaps the writer's blocks after the last copy that reads them."""


def _parse(offer: bytes) -> _Offer:
    """Parse a writer's offer. Raises HandoffError if it is invalid."""
    theirs = read_offer(_Offer, offer, "shm")
    if not theirs.block_bytes:
        raise HandoffError("the offer of transport shm has an invalid value: block_bytes")
    return theirs
