"""Batches in a link, cut into messages, and the buffers that hold them."""

from __future__ import annotations

import queue
from dataclasses import dataclass, field

from torch.distributed.distributed_c10d import Work

from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.encryption import Encryptor, wire_bytes
from kvtransfer.transports.process_group.process_pair import StagingBuffer
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Parts


@dataclass(eq=False, slots=True)
class Job:
    """A batch that a link's mover thread sends or receives."""

    number: int
    parts: Parts
    deadline: float
    transfer: Transfer = field(default_factory=Transfer)
    batch: AnnouncedBatch | None = None
    """The batch that the receiver decrypts; None for a writer."""
    memory: BlockMemory | None = None
    """Memory from which the parts are read. None if the parts are staged already, or are
    received."""
    staged: Staged | None = None
    writing: bool = False
    """Whether the mover thread may be writing to blocks. While it does, only the mover may fail the
    job."""
    dropped: bool = False
    """Whether the receiver drops the remaining messages of the batch."""


@dataclass(frozen=True, slots=True)
class Message:
    """The content of one message: ``count`` parts of a job's batch, from part ``first`` on."""

    job: Job
    first: int
    count: int

    @property
    def bytes(self) -> int:
        return self.count * wire_bytes(self.job.parts.length)

    @property
    def is_last(self) -> bool:
        return self.first + self.count == len(self.job.parts.blocks)


class Staged:
    """A staging buffer that holds a packed batch until the batch is sent or dropped."""

    def __init__(self, buffer: StagingBuffer, home: queue.SimpleQueue[StagingBuffer]) -> None:
        """``home`` is the queue to which the buffer returns after use."""
        self.buffer = buffer
        self._home: queue.SimpleQueue[StagingBuffer] | None = home

    def release(self) -> None:
        """Return the buffer to its queue; idempotent."""
        home, self._home = self._home, None
        if home is not None:
            home.put(self.buffer)

    def __del__(self) -> None:
        # For a batch that was packed and never sent. A SimpleQueue is safe in a destructor.
        self.release()


@dataclass(frozen=True, slots=True)
class Posted:
    """A message that was passed to the process group. It may still be in flight."""

    message: Message
    buffer: StagingBuffer
    work: Work


def encrypt_parts(
    encryptor: Encryptor,
    memory: BlockMemory,
    number: int,
    parts: Parts,
    buffer: StagingBuffer,
    first: int = 0,
    count: int | None = None,
) -> None:
    """Encrypt ``count`` parts of batch ``number``, from part ``first`` on, into a staging buffer.
    By default all parts are encrypted."""
    step = wire_bytes(parts.length)
    size = (len(parts.blocks) if count is None else count) * step
    outs = [buffer.view[at : at + step] for at in range(0, size, step)]
    encryptor.encrypt(memory, number, parts, first, outs)
    buffer.upload(size)


def messages_of(job: Job, message_bytes: int) -> list[Message]:
    """Divide a job into messages of at most ``message_bytes``. Both ends agree on this size, so
    both get the same messages."""
    total, most = len(job.parts.blocks), message_bytes // wire_bytes(job.parts.length)
    return [Message(job, first, min(most, total - first)) for first in range(0, total, most)]
