"""The nixl transport: for clusters whose network cards read remote memory directly (RDMA).

The receiver reads from the writer's registered blocks into staging in its own host memory. From
there it copies into its blocks, and checks the bytes. A writer has no path to a receiver's blocks.
One that was stopped and wakes later can only damage unused staging memory
(``kvtransfer.transports.nixl.reader``).

Without such hardware UCX carries reads over TCP, with the help of the writer's processor. The tests
do that, but it is not recommended: gRPC is about as fast and can be encrypted. If a receiver is
killed amid reads of some 100 MB, an error in UCX may end the writer (seen with nixl 1.5.1; not with
reads of the size used here, and never within one host). ``kvtransfer.transports.nixl.agent``
describes the settings.
"""

from __future__ import annotations

import base64
import json
import logging
import re
import secrets
from dataclasses import asdict
from weakref import WeakSet

from baton.errors import HandoffError, WorkerFailed
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.in_place import ReadSendLink
from kvtransfer.transports.nixl.agent import NixlAgent
from kvtransfer.transports.nixl.reader import SLOT_BYTES, NixlReader, Source, WriterMemory
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Peer

log = logging.getLogger(__name__)

_DEVICE = re.compile(r"cpu|cuda:\d{1,4}")


class NixlTransport:
    """Implements ``kvtransfer.transports.transport.Transport``."""

    name = "nixl"
    part_bytes = SLOT_BYTES
    batch_bytes = SLOT_BYTES
    copies_out = False
    reads_in_place = False
    needs_mac = True

    def __init__(self, incarnation: str, staging_bytes: int = 128 << 20) -> None:
        """``incarnation`` is this worker's. ``staging_bytes`` is the size of the host memory for
        arriving bytes."""
        # Also random, because two agents with one name would be confused.
        self._agent_name = f"{incarnation}-{secrets.token_hex(8)}"
        self._staging_bytes = staging_bytes
        self._send_links: WeakSet[ReadSendLink] = WeakSet()
        self._memory: BlockMemory | None = None
        self._agent: NixlAgent | None = None
        self._reader: NixlReader | None = None
        self._offer = b""

    @property
    def staging_bytes(self) -> int:
        """Number of bytes of this transport's staging memory. It is the size of the reader's
        staging memory, which is registered once. See ``Transport``."""
        return self._staging_bytes if self._reader is not None else 0

    def register(self, memory: BlockMemory) -> None:
        """Prepare the worker's blocks for this transport. Over RDMA this pins all of the memory.
        See ``Transport``."""
        agent = NixlAgent(self._agent_name)
        agent.register(memory.address, memory.blocks * memory.block_bytes, memory.device)
        # Before the staging memory is registered, because no peer may read that.
        self._offer = _encode(
            WriterMemory(
                agent=self._agent_name,
                metadata=agent.metadata(),
                address=memory.address,
                blocks=memory.blocks,
                block_bytes=memory.block_bytes,
                device=memory.device,
            )
        )
        self._reader = NixlReader(agent, memory, self._staging_bytes)
        self._agent, self._memory = agent, memory

    def offer(self) -> bytes:
        """Return the data with which a peer decides whether it can use this transport. An offer
        lets any process read the blocks, so it must go only to peers. See ``Transport``."""
        return self._offer

    def accept(self, peer: Peer, offer: bytes) -> tuple[NixlReceiveLink, bytes]:
        """Start to receive from a writer. Only the first batch shows whether the network works. See
        ``Transport``."""
        assert self._memory is not None, "not registered"
        assert self._reader is not None
        source = Source(_decode(offer))
        self._reader.open(source)
        return NixlReceiveLink(source, self._memory, self._reader), b""

    def connect(self, peer: Peer, answer: bytes) -> ReadSendLink:
        """Make the writer's end of the link. The receiver connects to the writer when it reads. See
        ``Transport``."""
        assert self._memory is not None, "not registered"
        if answer:
            raise HandoffError(
                f"{peer.incarnation} sent an answer that transport nixl does not expect"
            )
        link = ReadSendLink(self._memory)
        self._send_links.add(link)
        return link

    def close(self) -> None:
        """Close all links of this transport; idempotent. See ``Transport``."""
        for link in list(self._send_links):
            link.close()
        reader, self._reader = self._reader, None
        agent, self._agent = self._agent, None
        if reader is None or agent is None:
            return
        if reader.close():
            agent.close()
        else:
            log.warning("the thread of transport nixl is stuck; its memory is not freed")


class NixlReceiveLink:
    """Implements ``ReceiveLink``."""

    def __init__(self, source: Source, memory: BlockMemory, reader: NixlReader) -> None:
        self._source = source
        self._memory = memory
        self._reader = reader

    def receive(self, batch: AnnouncedBatch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        """Start to bring a batch into its target blocks. See ``ReceiveLink``."""
        transfer = self._source.transfers.new()
        if not wanted:
            transfer.cancel()
            return transfer
        try:
            self._check(batch)
        except HandoffError as error:
            transfer.fail(error)
            return transfer
        if not batch.source.blocks:
            transfer.finish()
            return transfer
        self._source.add(batch, transfer, deadline_s)
        self._reader.wake()
        return transfer

    def _check(self, batch: AnnouncedBatch) -> None:
        """Raise HandoffError if a batch names parts that do not exist. The check is needed because
        the peer names the parts."""
        theirs, source, target = self._source.memory, batch.source, batch.target
        end = source.offset + source.length
        if not 0 <= source.offset < end <= min(theirs.block_bytes, source.offset + SLOT_BYTES):
            raise HandoffError(f"batch {batch.number} lies outside its writer's blocks")
        if not all(0 <= block < theirs.blocks for block in source.blocks):
            raise HandoffError(f"batch {batch.number} names blocks that its writer does not have")
        counts = {len(source.blocks), len(target.blocks), len(batch.checksums)}
        if len(counts) > 1 or (source.offset, source.length) != (target.offset, target.length):
            raise HandoffError(f"batch {batch.number} has a target that does not match its source")

    def close(self) -> None:
        """End every transfer and disconnect; idempotent. See ``ReceiveLink``."""
        self._source.transfers.end(WorkerFailed("the pair was closed"))
        self._source.closed = True
        self._reader.wake()


def _encode(memory: WriterMemory) -> bytes:
    fields = asdict(memory) | {"metadata": base64.b64encode(memory.metadata).decode()}
    return json.dumps(fields).encode()


def _decode(offer: bytes) -> WriterMemory:
    """Parse a writer's offer. Raises HandoffError if it is invalid."""
    try:
        fields = json.loads(offer)
        memory = WriterMemory(
            agent=str(fields["agent"]),
            metadata=base64.b64decode(fields["metadata"], validate=True),
            address=int(fields["address"]),
            blocks=int(fields["blocks"]),
            block_bytes=int(fields["block_bytes"]),
            device=str(fields["device"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise HandoffError("the offer of transport nixl cannot be read") from error
    end = memory.address + memory.blocks * memory.block_bytes
    if not _DEVICE.fullmatch(memory.device) or not 0 < memory.address < end < 1 << 64:
        raise HandoffError("the offer of transport nixl has invalid values")
    return memory
