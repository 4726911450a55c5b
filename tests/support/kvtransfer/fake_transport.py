"""A transport whose bytes land when a test decides."""

from __future__ import annotations

import threading

from baton.errors import HandoffError, WorkerFailed
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.staging import Staging
from kvtransfer.transports.transfer import OpenTransfers, Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts, Peer

PART_BYTES, BATCH_BYTES = 64, 128


class FakeSendLink:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.packed: list[Parts] = []
        self.numbers: list[int] = []
        self.staging: Staging | None = None
        """Where batches are kept for the receiver, without checksums, if a test sets it."""
        self.sent: dict[int, tuple[Packed, Transfer]] = {}
        self.may_pack = threading.Event()
        self.may_pack.set()
        self.is_closed = False
        self._transfers = OpenTransfers()

    def pack(self, number: int, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """The checksum of a block is 1000 and its number."""
        assert self.may_pack.wait(20.0)
        self.packed.append(parts)
        self.numbers.append(number)
        if self.staging is not None:
            return Packed(parts, (), region=self.staging.take(parts.bytes, lambda: True))
        return Packed(parts, tuple(1000 + block for block in parts.blocks))

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        """See ``SendLink``."""
        transfer = self._transfers.new()
        self.sent[number] = packed, transfer
        return transfer

    def close(self) -> None:
        """See ``SendLink``."""
        self.is_closed = True
        self._transfers.end(WorkerFailed("the fake link was closed"))


class FakeReceiveLink:
    """Records the calls that it receives."""

    def __init__(self) -> None:
        self.batches: list[AnnouncedBatch] = []
        self.transfers: list[Transfer] = []
        self.is_closed = False
        self._transfers = OpenTransfers()

    def receive(self, batch: AnnouncedBatch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        """See ``ReceiveLink``."""
        transfer = self._transfers.new()
        if not wanted:
            transfer.cancel()
        self.batches.append(batch)
        self.transfers.append(transfer)
        return transfer

    def close(self) -> None:
        """See ``ReceiveLink``."""
        self.is_closed = True
        self._transfers.end(WorkerFailed("the fake link was closed"))


class FakeTransport:
    """Implements ``kvtransfer.transports.transport.Transport``, under the name of a real one."""

    part_bytes = PART_BYTES
    batch_bytes = BATCH_BYTES
    copies_out = False
    encrypts = False
    staging_bytes = 0

    def __init__(
        self,
        name: str = "shm",
        *,
        refuses: bool = False,
        reads_in_place: bool = False,
        offer: bytes | None = None,
    ) -> None:
        self.name = name
        self.reads_in_place = reads_in_place
        self.refuses = refuses
        self._offer = f"offer of {name}".encode() if offer is None else offer
        self.accepted: list[tuple[Peer, bytes]] = []
        self.connected: list[tuple[Peer, bytes]] = []
        self.receive_links: list[FakeReceiveLink] = []
        self.send_links: list[FakeSendLink] = []

    def register(self, memory: BlockMemory) -> None:
        """Nothing to do."""

    def offer(self) -> bytes:
        """See ``Transport``."""
        return self._offer

    def accept(self, peer: Peer, offer: bytes) -> tuple[FakeReceiveLink, bytes]:
        """See ``Transport``."""
        if self.refuses:
            raise HandoffError(f"{self.name} cannot")
        self.accepted.append((peer, offer))
        self.receive_links.append(FakeReceiveLink())
        return self.receive_links[-1], f"answer of {self.name}".encode()

    def connect(self, peer: Peer, answer: bytes) -> FakeSendLink:
        """See ``Transport``."""
        if self.refuses:
            raise HandoffError(f"{self.name} cannot")
        self.connected.append((peer, answer))
        self.send_links.append(FakeSendLink())
        return self.send_links[-1]

    def close(self) -> None:
        """See ``Transport``."""
        for receive_link in self.receive_links:
            receive_link.close()
        for send_link in self.send_links:
            send_link.close()
