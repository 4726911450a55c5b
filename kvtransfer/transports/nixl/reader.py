"""The thread of the nixl transport: it reads from writers, for all links.

Bytes are read into staging memory, which has a fixed number of slots that are registered once, and
are decrypted from there into their blocks. A read cannot be cancelled: after a release, even after
a disconnect, UCX still writes the bytes when a stopped writer wakes. So a slot is reused only when
its read has ended by itself. The slot of a stopped writer waits until that writer wakes or dies.
Each writer gets at most two slots, so that stopped ones leave slots for the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from baton.errors import BatonError, DeadlineExceeded, HandoffError, WorkerFailed
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.encryption import Decryptor, wire_bytes
from kvtransfer.transports.nixl.agent import NixlAgent
from kvtransfer.transports.transfer import OpenTransfers, Transfer
from kvtransfer.transports.transport import AnnouncedBatch

SLOT_BYTES = 8 << 20
"""Maximum bytes of one read; staging slots have this size. UCX emulates reads over TCP, and larger
ones would not be faster."""
_SLOTS_OF_A_WRITER = 2
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 0.0001, 0.002
_SLEEP_WITHOUT_HASTE_S = 0.02
_IDLE_S = 1.0
_END_S = 10.0
_STOPPING = WorkerFailed("this worker is stopping")


@dataclass(frozen=True, slots=True)
class WriterMemory:
    """Describes where a writer's staging memory is: its agent, address and size in bytes."""

    agent: str
    metadata: bytes
    address: int
    bytes: int


@dataclass(eq=False, slots=True)
class _Incoming:
    batch: AnnouncedBatch
    transfer: Transfer
    deadline: float
    """Deadline of the batch, in seconds of the monotonic clock."""
    posted: int = 0
    """Number of parts of the batch whose read has begun."""
    placed: int = 0
    over: bool = False


@dataclass(eq=False, slots=True)
class _Read:
    handle: int
    slot: int
    decryptor: Decryptor
    incoming: _Incoming
    first: int
    """Number of the first part in this read. The read covers ``count`` consecutive parts of the
    batch."""
    count: int


class Source:
    """A writer, as one link sees it, with the batches to read from that writer.

    Most fields belong to the reader's thread. The exceptions are the four fields that ``__init__``
    sets first, and the arrived batches.
    """

    def __init__(self, memory: WriterMemory, key: bytes) -> None:
        """``key`` is that of the link; see ``kvtransfer.transports.encryption``."""
        self.memory = memory
        self.decryptor = Decryptor(key)
        self.transfers = OpenTransfers()
        self.closed = False
        self._arrived: deque[_Incoming] = deque()
        self.incoming: list[_Incoming] = []

    def add(self, batch: AnnouncedBatch, transfer: Transfer, deadline_s: float) -> None:
        """Add a batch that is to be read from this writer; any thread may call this."""
        incoming = _Incoming(batch, transfer, time.monotonic() + deadline_s)

        def end(_: Transfer) -> None:
            incoming.over = True

        transfer.when_over(end)
        self._arrived.append(incoming)

    def sort(self, now: float) -> None:
        """Accept new batches, remove batches that are over, and fail batches whose deadline has
        passed."""
        while self._arrived:
            self.incoming.append(self._arrived.popleft())
        for incoming in self.incoming:
            if incoming.deadline <= now:
                late = f"batch {incoming.batch.number} did not arrive in time"
                incoming.transfer.fail(DeadlineExceeded(late))
        self.incoming = [incoming for incoming in self.incoming if not incoming.over]

    def next_unread(self) -> _Incoming | None:
        """Return the first batch with parts that were not requested from the writer yet; None if
        there is none."""
        for incoming in self.incoming:
            if not incoming.over and incoming.posted < len(incoming.batch.source.blocks):
                return incoming
        return None


@dataclass(eq=False, slots=True)
class _Writer:
    """A writer's agent, with the links that read from the writer, and the reads in flight."""

    memory: WriterMemory
    sources: list[Source] = field(default_factory=list)
    reads: list[_Read] = field(default_factory=list)
    lost: bool = False


class NixlReader:
    """Reads blocks from all writers on a thread of its own. The constructor starts the thread;
    ``close`` ends it."""

    def __init__(self, agent: NixlAgent, memory: BlockMemory, staging_bytes: int) -> None:
        """Register ``staging_bytes`` (at least two slots) with the agent. Raises ConfigError."""
        slots = max(_SLOTS_OF_A_WRITER, staging_bytes // SLOT_BYTES)
        self._agent = agent
        self._memory = memory
        self._staging = np.empty((slots, SLOT_BYTES), dtype=np.uint8)
        agent.register(self._staging.ctypes.data, self._staging.nbytes)
        self._free = list(range(slots))
        self._writers: dict[str, _Writer] = {}
        self._new: deque[Source] = deque()
        self._waiting: list[Source] = []
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="nixl-reader", daemon=True)
        self._thread.start()

    # For any thread

    def open(self, source: Source) -> None:
        """Let the thread read the batches of ``source`` from now on."""
        self._new.append(source)
        self._wake.set()
        if self._stopping:
            source.transfers.end(_STOPPING)

    def wake(self) -> None:
        """Wake the thread, because a source has changed."""
        self._wake.set()

    def close(self) -> bool:
        """End the reader's thread. Returns whether it has ended, so that the agent can be
        closed."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_END_S)
        return not self._thread.is_alive()

    # On the thread

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            # A programming error, too, must end everything that waits for this thread.
            self._stopping = True
            for source in [*self._sources(), *self._new]:
                source.transfers.end(_STOPPING)

    def _serve(self) -> None:
        sleep = _SHORTEST_SLEEP_S
        while not self._stopping:
            self._wake.clear()
            moved = self._turn(time.monotonic())
            sleep = _SHORTEST_SLEEP_S if moved else min(2 * sleep, _LONGEST_SLEEP_S)
            if any(source.incoming for source in self._sources()):
                time.sleep(sleep)
            elif any(writer.reads for writer in self._writers.values()):
                self._wake.wait(_SLEEP_WITHOUT_HASTE_S)
            else:
                self._wake.wait(_IDLE_S)

    def _sources(self) -> list[Source]:
        attached = [source for writer in self._writers.values() for source in writer.sources]
        return [*self._waiting, *attached]

    def _turn(self, now: float) -> bool:
        """Make one round of the thread's work: accept batches, finish reads, begin new ones.

        Returns whether any read has ended.
        """
        self._attach_new()
        for source in self._sources():
            source.sort(now)
        moved = False
        for writer in self._writers.values():
            moved |= self._look_after(writer)
        for writer in self._writers.values():
            self._read_on(writer)
        self._drop_unused()
        self._let_others_first()
        return moved

    def _attach_new(self) -> None:
        while self._new:
            self._waiting.append(self._new.popleft())
        waiting, self._waiting = self._waiting, []
        for source in waiting:
            if source.closed:
                continue
            try:
                self._attach(source)
            except BatonError as error:
                source.transfers.end(error)

    def _attach(self, source: Source) -> None:
        """Attach a source to its writer's agent. If an earlier agent of the same name was lost,
        wait until that agent is removed.

        Raises HandoffError.
        """
        theirs = source.memory
        writer = self._writers.get(theirs.agent)
        if writer is None:
            if (name := self._agent.load(theirs.metadata)) != theirs.agent:
                self._agent.forget(name)
                raise HandoffError(f"the metadata of {theirs.agent} belongs to another agent")
            writer = self._writers[theirs.agent] = _Writer(theirs)
        if writer.lost:
            self._waiting.append(source)
            return
        if writer.memory != theirs:
            raise HandoffError(f"{theirs.agent} offers other memory than before")
        writer.sources.append(source)

    def _look_after(self, writer: _Writer) -> bool:
        moved = False
        for read in list(writer.reads):
            try:
                if not self._agent.ended(writer.memory.agent, read.handle):
                    continue
            except WorkerFailed as error:
                self._lose(writer, error)
            else:
                self._place(read)
            moved = True
            self._agent.release(read.handle)
            writer.reads.remove(read)
            self._free.append(read.slot)
        return moved

    def _lose(self, writer: _Writer, error: BatonError) -> None:
        writer.lost = True
        for source in writer.sources:
            source.transfers.end(error)

    def _place(self, read: _Read) -> None:
        incoming = read.incoming
        if not incoming.transfer.begin():
            return
        try:
            self._decrypt(read)
        except Exception as error:
            incoming.transfer.fail(error)
            return
        incoming.placed += read.count
        if incoming.placed == len(incoming.batch.target.blocks):
            incoming.transfer.finish()
        else:
            incoming.transfer.pause()

    def _decrypt(self, read: _Read) -> None:
        batch, slot = read.incoming.batch, memoryview(self._staging[read.slot])
        step = wire_bytes(batch.target.length)
        for position in range(read.count):
            data = slot[position * step : (position + 1) * step]
            read.decryptor.decrypt(self._memory, batch, read.first + position, data)

    def _read_on(self, writer: _Writer) -> None:
        for source in writer.sources:
            while (incoming := source.next_unread()) is not None:
                if writer.lost or len(writer.reads) == _SLOTS_OF_A_WRITER or not self._free:
                    return
                try:
                    writer.reads.append(self._begin(source, incoming))
                except HandoffError as error:
                    incoming.transfer.fail(error)
                except WorkerFailed as error:
                    self._lose(writer, error)

    def _begin(self, source: Source, incoming: _Incoming) -> _Read:
        """Begin a read of a batch's next parts. Raises HandoffError, WorkerFailed."""
        theirs, batch = source.memory, incoming.batch
        step, first = wire_bytes(batch.source.length), incoming.posted
        count = min(SLOT_BYTES // step, len(batch.source.blocks) - first)
        remote = theirs.address + batch.staged_at + first * step
        slot = self._free[-1]
        local = self._staging.ctypes.data + slot * SLOT_BYTES
        handle = self._agent.begin_read(theirs.agent, remote, local, count * step)
        self._free.pop()
        incoming.posted += count
        return _Read(handle, slot, source.decryptor, incoming, first, count)

    def _drop_unused(self) -> None:
        for writer in list(self._writers.values()):
            writer.sources = [source for source in writer.sources if not source.closed]
            if not writer.reads and (writer.lost or not writer.sources):
                self._agent.forget(writer.memory.agent)
                del self._writers[writer.memory.agent]

    def _let_others_first(self) -> None:
        """Move the writer that was served first to the end of the order, so that the others are
        served first next time."""
        for name in list(self._writers)[:1]:
            self._writers[name] = self._writers.pop(name)
