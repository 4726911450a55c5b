"""Transports whose bytes travel through the simulated network, of the two kinds that there are.

``PullTransport`` is like shm: the receiver reads the writer's memory, even when the writer is
frozen or dead. ``PushTransport`` is like grpc: the writer's thread reads and sends, the receiver
puts in place what comes. Both place a part in two halves, with time between them.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import BatonError, DeadlineExceeded, HandoffError, WorkerFailed
from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.transfer import OpenTransfers, Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts, Peer, damaged
from tests.unit.handoff_model.memory import BLOCK_BYTES, SimulatedMemory
from tests.unit.handoff_model.network import DATA, Fault, Network, Server, Wire, flip
from tests.unit.handoff_model.process import Process

PART_BYTES = BLOCK_BYTES // 2
BATCH_BYTES = 2 * BLOCK_BYTES
COPY_S = 0.004
"""How long half a part takes: longer than calls, so that all else happens during copies too."""
PATIENCE_S = 1.0
"""How long bytes may be early."""
_HEAD_BYTES = 8


@dataclass(frozen=True)
class Watch:
    """The test's eyes on a worker's memory, called when a transport touches it."""

    is_given_back: Callable[[Parts], bool]
    """Whether some of these sources have no owner any more."""
    complain: Callable[[str], None]
    beginning: Callable[[int], None]
    """A transport is about to write a part, or a batch, whose first block is this."""
    writing: Callable[[int], None]
    """A transport writes into this block."""


class Placer:
    """A receiver's thread: places parts, a half at a time, one after another."""

    def __init__(self, process: Process, memory: SimulatedMemory, watch: Watch) -> None:
        self._process = process
        self._memory = memory
        self._watch = watch
        self._work: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def submit(self, work: Callable[[], None]) -> None:
        """Do it once all before it has been done; it says ``next`` when it has."""
        self._work.append(work)
        if not self._is_busy:
            self._is_busy = True
            self.next()

    def next(self) -> None:
        """Go on."""
        if self._work:
            self._process.loop.call_later(COPY_S, self._work.popleft())
        else:
            self._is_busy = False

    def place(
        self,
        batch: AnnouncedBatch,
        index: int,
        data: bytes,
        after: Callable[[Exception | None], None],
    ) -> None:
        """Write a part and compare its checksum."""
        block, offset = batch.target.blocks[index], batch.target.offset
        half = len(data) // 2

        def second() -> None:
            self._watch.writing(block)
            self._memory.write(block, offset + half, memoryview(data)[half:])
            try:
                if batch.checksums and checksum(data) != batch.checksums[index]:
                    raise damaged(batch.number)
            except Exception as error:
                after(error)
            else:
                after(None)

        self._watch.writing(block)
        self._memory.write(block, offset, memoryview(data)[:half])
        self._process.loop.call_later(COPY_S, second)


class SimulatedTransport:
    """What both kinds share."""

    name = ""
    part_bytes = PART_BYTES
    batch_bytes = BATCH_BYTES
    copies_out = False
    reads_in_place = False
    encrypts = False
    staging_bytes = 0

    def __init__(
        self, server: Server, network: Network, address: str, memory: SimulatedMemory, watch: Watch
    ) -> None:
        self.network = network
        self.process = server.process
        self.address = address
        self.memory = memory
        self.watch = watch
        self.placer = Placer(self.process, memory, watch)

    def register(self, memory: BlockMemory) -> None:
        """See ``Transport``."""

    def close(self) -> None:
        """See ``Transport``."""

    def pack(self, parts: Parts) -> Packed:
        """Read the parts' checksums."""
        read = self.memory.checksum
        return Packed(parts, tuple(read(b, parts.offset, parts.length) for b in parts.blocks))


# The receiver reads


class PullTransport(SimulatedTransport):
    """See the module's text."""

    name = "shm"
    reads_in_place = True
    encrypts = False

    def offer(self) -> bytes:
        self.network.memories[self.process.name] = self.memory
        return self.process.name.encode()

    def accept(self, peer: Peer, offer: bytes) -> tuple[PullReceiveLink, bytes]:
        theirs = self.network.memories.get(offer.decode())
        if theirs is None:
            raise HandoffError("nobody's memory")
        return PullReceiveLink(self, peer.incarnation, theirs), b""

    def connect(self, peer: Peer, answer: bytes) -> PullSendLink:
        link = PullSendLink(self)
        self.network.senders[self.process.name, peer.incarnation] = link.read
        return link


class PullSendLink:
    """Implements ``SendLink``."""

    def __init__(self, transport: PullTransport) -> None:
        self._transport = transport
        self._transfers = OpenTransfers()
        self._sent: dict[int, Parts] = {}

    def pack(self, number: int, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        return self._transport.pack(parts)

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        self._sent[number] = packed.parts
        transfer = self._transfers.new()
        transfer.finish()
        return transfer

    def read(self, number: int, parts: Parts) -> None:
        """The receiver reads. What it does after this end has closed comes to nothing."""
        is_alive = self._transport.process.is_alive
        is_open = is_alive and self._transfers.error is None and self._sent.get(number) == parts
        if is_open and self._transport.watch.is_given_back(parts):
            self._transport.watch.complain(f"{parts.blocks} are copied and were given back")

    def close(self) -> None:
        self._transfers.end(WorkerFailed("the pair was closed"))


class PullReceiveLink:
    """Implements ``ReceiveLink``."""

    def __init__(self, transport: PullTransport, writer: str, theirs: SimulatedMemory) -> None:
        self._transport = transport
        self._ends = (writer, transport.process.name)
        self._placer = transport.placer
        self._theirs = theirs
        self._transfers = OpenTransfers()

    def receive(self, batch: AnnouncedBatch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        transfer = self._transfers.new()
        if wanted:
            self._placer.submit(lambda: self._begin(batch, transfer))
        else:
            transfer.cancel()
        return transfer

    def _begin(self, batch: AnnouncedBatch, transfer: Transfer) -> None:
        if transfer.begin():
            self._transport.watch.beginning(batch.target.blocks[0])
            self._copy(batch, transfer, 0)
        else:
            self._placer.next()

    def _copy(self, batch: AnnouncedBatch, transfer: Transfer, index: int) -> None:
        if index == len(batch.source.blocks):
            transfer.finish()
            self._placer.next()
            return
        try:
            data = self._read(batch, index)
        except BatonError as error:
            self._end(transfer, error)
            return
        if not batch.checksums:
            transfer.found += (checksum(data),)
        self._placer.place(
            batch,
            index,
            data,
            lambda error: (
                self._end(transfer, error) if error else self._copy(batch, transfer, index + 1)
            ),
        )

    def _end(self, transfer: Transfer, error: Exception) -> None:
        transfer.fail(error)
        self._placer.next()

    def _read(self, batch: AnnouncedBatch, index: int) -> bytes:
        source = batch.source
        read = self._transport.network.senders.get(self._ends)
        if read is not None:
            read(batch.number, source)
        data = self._theirs.part(source.blocks[index], source.offset, source.length)
        strike = self._transport.network.strike(DATA)
        if strike is None:
            return data
        if strike.fault is Fault.FLIPPED:
            return flip(data, strike.amount)
        raise WorkerFailed("the writer's memory cannot be read")

    def close(self) -> None:
        self._transfers.end(WorkerFailed("the pair was closed"))


# The writer sends


class PushTransport(SimulatedTransport):
    """See the module's text."""

    name = "grpc"

    def __init__(
        self, server: Server, network: Network, address: str, memory: SimulatedMemory, watch: Watch
    ) -> None:
        super().__init__(server, network, address, memory, watch)
        self.links: dict[str, PushReceiveLink] = {}
        self._pairs = 0
        server.accept_bytes = self.accept_bytes

    def offer(self) -> bytes:
        return b""

    def accept(self, peer: Peer, offer: bytes) -> tuple[PushReceiveLink, bytes]:
        self._pairs += 1
        pair = f"{self.process.name}/{self._pairs}"
        self.links[pair] = PushReceiveLink(self, pair)
        return self.links[pair], json.dumps([self.address, pair]).encode()

    def connect(self, peer: Peer, answer: bytes) -> PushSendLink:
        address, pair = json.loads(answer)
        return PushSendLink(self, address, pair)

    def accept_bytes(self, pair: str, message: bytes) -> None:
        """A part has come; an empty message says that its connection has ended."""
        link = self.links.get(pair)
        if link is None:
            return
        if message:
            link.take(message)
        else:
            link.end(WorkerFailed("its stream has ended"))


class PushSendLink:
    """Implements ``SendLink``."""

    def __init__(self, transport: PushTransport, address: str, pair: str) -> None:
        self._transport = transport
        self._address = address
        self._pair = pair
        self._transfers = OpenTransfers()
        self._wire = Wire(transport.network, lambda _: DATA, self._arrive, self.lose)
        self._server: Server | None = None
        self._work: deque[Callable[[], None]] = deque()
        self._is_busy = False
        transport.network.opened(self)

    def pack(self, number: int, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        return self._transport.pack(parts)

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        transfer = self._transfers.new()
        parts = packed.parts
        for index in range(len(parts.blocks)):
            self._work.append(lambda index=index: self._part(number, index, parts))  # type: ignore[misc]
        self._work.append(transfer.finish)
        late = DeadlineExceeded("a batch was not sent in time")
        self._transport.process.loop.call_later(deadline_s, transfer.give_up, late)
        self._go_on()
        return transfer

    def _go_on(self) -> None:
        if self._work and not self._is_busy:
            self._is_busy = True
            self._transport.process.loop.call_later(COPY_S, self._do)

    def _do(self) -> None:
        self._is_busy = False
        self._work.popleft()()
        self._go_on()

    def _part(self, number: int, index: int, parts: Parts) -> None:
        """As of a real thread: memory is read when it is sent, not when it was packed."""
        if self._transfers.error is None:
            if self._transport.watch.is_given_back(parts):
                self._transport.network.stale.add((self._pair, number, index))
            data = self._transport.memory.part(parts.blocks[index], parts.offset, parts.length)
            head = number.to_bytes(4, "little") + index.to_bytes(4, "little")
            self._wire.send(head + data)

    def _arrive(self, message: bytes) -> None:
        if self._server is None:
            self._server = self._transport.network.server(self._address)
        if self._server is None or not self._server.process.is_alive:
            self.lose()
        else:
            assert self._server.accept_bytes is not None
            self._server.process.soon(self._server.accept_bytes, self._pair, message)

    def close(self) -> None:
        self._end(WorkerFailed("the pair was closed"))

    def _end(self, error: BatonError) -> None:
        self._transport.network.closed(self)
        self._transfers.end(error)
        if self._transport.process.is_alive:
            self._wire.end(self._hang_up)

    def has_end(self, process: Process) -> bool:
        """See ``Connection``."""
        server = self._server.process if self._server is not None else None
        return process in (self._transport.process, server)

    def lose(self) -> None:
        """See ``Connection``."""
        self._transport.network.closed(self)
        self._transport.process.soon(self._transfers.end, WorkerFailed("its stream broke"))
        self._hang_up()

    def _hang_up(self) -> None:
        server = self._server or self._transport.network.server(self._address)
        if server is not None and server.accept_bytes is not None:
            server.process.soon(server.accept_bytes, self._pair, b"")


@dataclass(slots=True)
class _Awaited:
    batch: AnnouncedBatch
    transfer: Transfer
    parts: int = 0


class PushReceiveLink:
    """Implements ``ReceiveLink``."""

    def __init__(self, transport: PushTransport, pair: str) -> None:
        self._transport = transport
        self._placer = transport.placer
        self._pair = pair
        self._transfers = OpenTransfers()
        self._awaited: dict[int, _Awaited] = {}
        self._early: deque[bytes] = deque()
        self._is_placing = False

    def receive(self, batch: AnnouncedBatch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        transfer = self._transfers.new()
        if not wanted:
            transfer.cancel()
        self._awaited[batch.number] = _Awaited(batch, transfer)
        late = DeadlineExceeded("a batch did not come in time")
        self._transport.process.loop.call_later(deadline_s, transfer.give_up, late)
        self._go_on()
        return transfer

    def take(self, message: bytes) -> None:
        """A part, behind those that came before it."""
        self._early.append(message)
        self._transport.process.loop.call_later(PATIENCE_S, self._check_patience, message)
        self._go_on()

    def _check_patience(self, message: bytes) -> None:
        if not self._is_placing and self._early and self._early[0] is message:
            self.end(HandoffError("bytes came of which nothing was said"))

    def _go_on(self) -> None:
        while self._early and not self._is_placing and self._transfers.error is None:
            number = int.from_bytes(self._early[0][:4], "little")
            if number not in self._awaited:
                return
            self._part(number, self._early.popleft())

    def _part(self, number: int, message: bytes) -> None:
        awaited = self._awaited[number]
        index, data = int.from_bytes(message[4:_HEAD_BYTES], "little"), message[_HEAD_BYTES:]
        total = len(awaited.batch.checksums)
        if index != awaited.parts or len(data) != awaited.batch.source.length:
            self.end(HandoffError(f"part {index} of batch {number} cannot be"))
            return
        awaited.parts += 1
        is_last = awaited.parts == total
        if is_last:
            del self._awaited[number]
        if not awaited.transfer.begin():
            return
        self._transport.watch.beginning(awaited.batch.target.blocks[index])
        if (self._pair, number, index) in self._transport.network.stale:
            self._transport.watch.complain(f"batch {number} is placed and was given back")
        self._is_placing = True
        self._placer.submit(lambda: self._place(awaited, index, data, is_last))

    def _place(self, awaited: _Awaited, index: int, data: bytes, is_last: bool) -> None:
        transfer = awaited.transfer

        def after(error: Exception | None) -> None:
            if error is not None:
                transfer.fail(error)
            elif is_last:
                transfer.finish()
            else:
                transfer.pause()
            self._is_placing = False
            self._placer.next()
            self._go_on()

        self._placer.place(awaited.batch, index, data, after)

    def end(self, error: BatonError) -> None:
        """The stream has ended."""
        self._transfers.end(error)

    def close(self) -> None:
        self._transport.links.pop(self._pair, None)
        self.end(WorkerFailed("the pair was closed"))
