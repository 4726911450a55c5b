"""The nixl transport: for clusters whose network cards read remote memory directly (RDMA).

A writer encrypts batches into registered staging memory on its host. The receiver reads them from
there into staging of its own, and decrypts them into its blocks. A writer has no path to a
receiver's blocks, and a receiver none to a writer's. A writer that was stopped and wakes later can
only damage unused staging memory (``kvtransfer.transports.nixl.reader``).

Without such hardware UCX carries reads over TCP, with the help of the writer's processor. The tests
do that, but it is not recommended: gRPC is about as fast. If a receiver is killed amid reads of
some 100 MB, an error in UCX may end the writer (seen with nixl 1.5.1; not with reads of the size
used here, and never within one host). ``kvtransfer.transports.nixl.agent`` describes the settings.
"""

from __future__ import annotations

import base64
import json
import logging
import secrets
from weakref import WeakSet

from baton.errors import HandoffError, WorkerFailed
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.encryption import (
    UNENCRYPTED,
    Encryptor,
    new_key,
    read_key,
    wire_bytes,
)
from kvtransfer.transports.nixl.agent import NixlAgent
from kvtransfer.transports.nixl.reader import SLOT_BYTES, NixlReader, Source, WriterMemory
from kvtransfer.transports.staging import Staging
from kvtransfer.transports.transfer import OpenTransfers, Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts, Peer

log = logging.getLogger(__name__)


class NixlTransport:
    """Implements ``kvtransfer.transports.transport.Transport``."""

    name = "nixl"
    part_bytes = SLOT_BYTES - SLOT_BYTES // 16
    batch_bytes = part_bytes  # with room for what encryption adds
    copies_out = True
    reads_in_place = False
    encrypts = True

    def __init__(self, incarnation: str, staging_bytes: int = 128 << 20) -> None:
        """``incarnation`` is this worker's. ``staging_bytes`` is the size of the host memory for
        arriving bytes, and of that for departing ones."""
        # Also random, because two agents with one name would be confused.
        self._agent_name = f"{incarnation}-{secrets.token_hex(8)}"
        self._staging_bytes = staging_bytes
        self._send_links: WeakSet[NixlSendLink] = WeakSet()
        self._memory: BlockMemory | None = None
        self._agent: NixlAgent | None = None
        self._reader: NixlReader | None = None
        self._staging: Staging | None = None
        self._offer = b""

    @property
    def staging_bytes(self) -> int:
        """Number of bytes of this transport's staging memory, of both directions, which is
        registered once. See ``Transport``."""
        return 2 * self._staging_bytes if self._reader is not None else 0

    def register(self, memory: BlockMemory) -> None:
        """Prepare this transport for the worker's blocks. Over RDMA this pins the staging memory.
        See ``Transport``."""
        agent = NixlAgent(self._agent_name)
        staging = Staging(self._staging_bytes)
        agent.register(staging.address, staging.bytes)
        # Before the memory for arriving bytes is registered, because no peer may read that.
        metadata = agent.metadata()
        self._offer = _encode(
            WriterMemory(self._agent_name, metadata, staging.address, staging.bytes)
        )
        self._reader = NixlReader(agent, memory, self._staging_bytes)
        self._agent, self._memory, self._staging = agent, memory, staging

    def offer(self) -> bytes:
        """Return the data with which a peer decides whether it can use this transport. An offer
        lets any process read the staging memory. See ``Transport``."""
        return self._offer

    def accept(self, peer: Peer, offer: bytes) -> tuple[NixlReceiveLink, bytes]:
        """Start to receive from a writer. Only the first batch shows whether the network works. See
        ``Transport``."""
        assert self._reader is not None, "not registered"
        key = new_key()
        source = Source(_decode(offer), key)
        self._reader.open(source)
        return NixlReceiveLink(source, self._reader), json.dumps({"key": key.hex()}).encode()

    def connect(self, peer: Peer, answer: bytes) -> NixlSendLink:
        """Make the writer's end of the link. The receiver connects to the writer when it reads. See
        ``Transport``."""
        if self._memory is None or self._staging is None:
            raise HandoffError("transport nixl is closed")
        try:
            told = str(json.loads(answer)["key"])
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            reason = f"{peer.incarnation} has sent no answer of transport nixl"
            raise HandoffError(reason) from error
        link = NixlSendLink(self._memory, self._staging, read_key(told))
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


class NixlSendLink:
    """Implements ``SendLink`` without sending: the receiver reads the staging memory."""

    def __init__(self, memory: BlockMemory, staging: Staging, key: bytes) -> None:
        self._memory = memory
        self._staging = staging
        self._encryptor = Encryptor(key)
        self._transfers = OpenTransfers()

    def pack(self, number: int, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """Encrypt parts of blocks into the staging memory. Waits for room there, some seconds at
        most. See ``SendLink``."""
        step = wire_bytes(parts.length)
        region = self._staging.take(len(parts.blocks) * step, lambda: self._transfers.error is None)
        outs = [region.view[at : at + step] for at in range(0, region.view.nbytes, step)]
        source = self._memory if memory is None else memory
        self._encryptor.encrypt(source, number, parts, 0, outs)
        return Packed(parts, (), region=region)

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        """Return a transfer that is over already, because the receiver reads the batch. See
        ``SendLink``."""
        transfer = self._transfers.new()
        transfer.finish()
        return transfer

    def close(self) -> None:
        """Fail transfers that are made from now on; idempotent. See ``SendLink``."""
        self._transfers.end(WorkerFailed("the pair was closed"))


class NixlReceiveLink:
    """Implements ``ReceiveLink``."""

    def __init__(self, source: Source, reader: NixlReader) -> None:
        self._source = source
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
        source, target = batch.source, batch.target
        step = wire_bytes(source.length)
        end = batch.staged_at + len(source.blocks) * step
        if source.length <= 0 or step > SLOT_BYTES:
            raise HandoffError(f"batch {batch.number} has parts of {source.length} bytes")
        if not 0 <= batch.staged_at <= end <= self._source.memory.bytes:
            raise HandoffError(f"batch {batch.number} lies outside its writer's staging memory")
        alike = (len(source.blocks), source.offset, source.length)
        if alike != (len(target.blocks), target.offset, target.length):
            raise HandoffError(f"batch {batch.number} has a target that does not match its source")

    def close(self) -> None:
        """End every transfer and disconnect; idempotent. See ``ReceiveLink``."""
        self._source.transfers.end(WorkerFailed("the pair was closed"))
        self._source.closed = True
        self._reader.wake()


def _encode(memory: WriterMemory) -> bytes:
    """Write a writer's offer. Workers of versions that do not encrypt refuse it: they look for the
    ``address`` of blocks."""
    fields = {
        "agent": memory.agent,
        "metadata": base64.b64encode(memory.metadata).decode(),
        "staging_address": memory.address,
        "staging_bytes": memory.bytes,
    }
    return json.dumps(fields).encode()


def _decode(offer: bytes) -> WriterMemory:
    """Parse a writer's offer. Raises HandoffError if it is invalid."""
    try:
        fields = json.loads(offer)
        if "block_bytes" in fields:
            raise HandoffError(f"a worker {UNENCRYPTED}")
        memory = WriterMemory(
            agent=str(fields["agent"]),
            metadata=base64.b64decode(fields["metadata"], validate=True),
            address=int(fields["staging_address"]),
            bytes=int(fields["staging_bytes"]),
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise HandoffError("the offer of transport nixl cannot be read") from error
    if not 0 < memory.address < memory.address + memory.bytes < 1 << 64:
        raise HandoffError("the offer of transport nixl has invalid values")
    return memory
