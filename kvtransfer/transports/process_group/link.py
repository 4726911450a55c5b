"""The two ends of a pair whose bytes go through a process group.

    new ─first batch→ connecting ─→ forming ─→ moving;  any of them ─death, deadline, close→ broken

A link has two threads, from its first batch on. The *watcher* waits for sockets and deadlines. It
connects, and breaks the link when the other process is gone or a batch is late. The *mover* forms
the process group and moves the batches in order. A broken link stays broken: the pair uses a new
one, with another process group.

A batch is one message, unless it is larger than a staging buffer: then it is several, of whole
parts. Two messages are in flight at a time, so that one is on the wire while another is copied.
"""

from __future__ import annotations

import logging
import queue
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from baton.errors import BatonError, ChecksumMismatch, DeadlineExceeded, HandoffError, WorkerFailed
from kvtransfer.memory.memory import BlockMemory, check_part
from kvtransfer.transports.encryption import Decryptor, Encryptor, wire_bytes
from kvtransfer.transports.process_group.messages import (
    Job,
    Message,
    Posted,
    Staged,
    encrypt_parts,
    messages_of,
)
from kvtransfer.transports.process_group.process_pair import MAX_TAG, ProcessPair, StagingBuffer
from kvtransfer.transports.process_group.rendezvous import Opener, PairStore
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts

log = logging.getLogger(__name__)

BUFFERS = 4
"""Number of staging buffers of a link: two for the mover. A writer uses the other two for packed
batches."""
_MOVING = 2
_GRACE_S = 5.0
"""Seconds after a batch's deadline at which the mover stops waiting by itself. The watcher normally
breaks the link before that."""
_JOIN_S = 1.0


@dataclass(frozen=True, slots=True)
class LinkPlan:
    """What both ends of a link have agreed on, and how this end connects."""

    name: str
    """Name of the transport: ``gloo`` or ``nccl``."""
    peer: str
    """Name of the other worker, for log and error messages."""
    opener: Opener
    form: Callable[[PairStore], ProcessPair]
    new_buffer: Callable[[], StagingBuffer]
    message_bytes: int
    """Maximum bytes of a message, encrypted: the size of a staging buffer."""
    key: bytes = field(repr=False)
    """The key of the link; see ``kvtransfer.transports.encryption``."""


class _Link:
    """The part that a link's sending and receiving ends share: its threads, jobs and buffers."""

    def __init__(self, plan: LinkPlan, memory: BlockMemory) -> None:
        self._plan = plan
        self._memory = memory
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._messages: deque[Message] = deque()
        self._error: BatonError | None = None
        self._store: PairStore | None = None
        self._pair: ProcessPair | None = None
        self._threads: tuple[threading.Thread, ...] = ()
        self._buffers: list[StagingBuffer] = []
        self._made = 0
        self._woken, self._waker = socket.socketpair()
        self._woken.setblocking(False)
        self._waker.setblocking(False)

    @property
    def staging_bytes(self) -> int:
        """Number of bytes in all staging buffers of the link."""
        return 0 if self.is_over else self._made * self._plan.message_bytes

    def _new_buffer(self) -> StagingBuffer:
        with self._changed:
            self._made += 1
        return self._plan.new_buffer()

    @property
    def is_broken(self) -> bool:
        return self._error is not None

    @property
    def is_over(self) -> bool:
        """Whether the link is broken, and all its threads have ended."""
        return self.is_broken and not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Close the link. Threads and sockets may take a moment longer to end; see ``SendLink`` and
        ``ReceiveLink``.

        It does not wait for them, because an event loop may call it. ``join`` waits.
        """
        self._break(WorkerFailed(f"the link to {self._plan.peer} was closed"))
        if not self._threads:
            self._close_sockets()

    def join(self) -> None:
        """Wait until the link's threads have ended, 2 seconds at most; call it after ``close``."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_JOIN_S)

    def _submit(self, job: Job) -> Transfer:
        """Queue a batch after all queued ones. Returns its transfer."""
        if not job.parts.bytes:
            job.transfer.finish()
            return job.transfer
        if wire_bytes(job.parts.length) > self._plan.message_bytes:
            job.transfer.fail(HandoffError(f"{job.parts.length} bytes exceed a staging buffer"))
            return job.transfer
        with self._changed:
            error = self._error
            if error is None:
                self._jobs.append(job)
                self._messages.extend(messages_of(job, self._plan.message_bytes))
                self._changed.notify_all()
                self._start()
        if error is not None:
            job.transfer.fail(WorkerFailed(error.message))
        self._wake()
        return job.transfer

    def _start(self) -> None:
        if not self._threads:
            name = f"kv-{self._plan.name}"
            self._threads = (
                threading.Thread(target=self._watch, name=f"{name}-watcher", daemon=True),
                threading.Thread(target=self._move, name=f"{name}-mover", daemon=True),
            )
            for thread in self._threads:
                thread.start()

    # The watcher's thread

    def _watch(self) -> None:
        try:
            with self._plan.opener.open(self._ready) as connection:
                self._plan.opener.close()
                self._serve(PairStore(connection), connection)
        except (BatonError, OSError) as error:
            self._break(self._told(error))
        except Exception as error:
            log.exception("the watcher of a link failed")
            self._break(self._told(error))
        finally:
            self._close_sockets()

    def _serve(self, store: PairStore, connection: socket.socket) -> None:
        with self._changed:
            self._store = store
            self._changed.notify_all()
        while self._ready(connection) and store.receive():
            pass
        self._break(WorkerFailed(f"{self._plan.peer} has ended its side of the link"))

    def _ready(
        self, waited: socket.socket, *, to_write: bool = False, until: float | None = None
    ) -> bool:
        """Wait until a socket is ready: see ``Readiness``. Raises DeadlineExceeded when the
        deadline of a batch has passed."""
        poll = select.poll()
        poll.register(self._woken, select.POLLIN)
        poll.register(waited, select.POLLOUT if to_write else select.POLLIN)
        while True:
            deadline = self._next_deadline()
            wait_s = _seconds_to(deadline, until)
            found = {number for number, _ in poll.poll(None if wait_s is None else wait_s * 1000)}
            if self._woken.fileno() in found:
                self._woken.recv(64)
            if deadline is not None and time.monotonic() >= deadline:
                raise DeadlineExceeded(f"no KV blocks moved to or from {self._plan.peer} in time")
            if waited.fileno() in found:
                return True
            if until is not None and time.monotonic() >= until:
                return False

    def _next_deadline(self) -> float | None:
        """Return the earliest deadline of all batches. Raises the error that has ended the link."""
        with self._changed:
            if self._error is not None:
                raise _copy(self._error)
            return min((job.deadline for job in self._jobs), default=None)

    def _wake(self) -> None:
        # If the socket is full, the watcher wakes anyway. If it is closed, the watcher has ended.
        # The lock prevents a close meanwhile: its number could then belong to another file.
        with self._changed, suppress(OSError):
            self._waker.send(b"\0")

    def _close_sockets(self) -> None:
        self._plan.opener.close()
        with self._changed:
            self._woken.close()
            self._waker.close()

    # The mover's thread

    def _move(self) -> None:
        posted: deque[Posted] = deque()
        try:
            pair = self._form()
            while self._wait_for_message(has_posted=bool(posted)):
                while len(posted) < _MOVING and (message := self._next_message()) is not None:
                    posted.append(self._post(pair, message))
                # Empty if the link broke meanwhile, which drops its messages.
                if posted:
                    self._settle(pair, posted.popleft())
        except (BatonError, RuntimeError, OSError) as error:  # torch raises RuntimeErrors
            self._break(self._told(error))
        except Exception as error:
            log.exception("the mover of a link failed")
            self._break(self._told(error))
        finally:
            # The memory of a message must outlive the process group's use of it.
            posted.clear()
            self._pair = None

    def _form(self) -> ProcessPair:
        with self._changed:
            self._changed.wait_for(lambda: self._store is not None or self.is_broken)
            if self._error is not None:
                raise _copy(self._error)
            assert self._store is not None
            store = self._store
        self._buffers = [self._new_buffer() for _ in range(_MOVING)]
        pair = self._plan.form(store)
        with self._changed:
            if self._error is not None:
                raise _copy(self._error)
            self._pair = pair
        return pair

    def _wait_for_message(self, *, has_posted: bool) -> bool:
        """Wait until a message can be passed to the process group, or a posted message must be
        awaited. Returns False if the link is broken."""
        with self._changed:
            self._changed.wait_for(lambda: has_posted or self._messages or self.is_broken)
            return not self.is_broken

    def _next_message(self) -> Message | None:
        with self._changed:
            return self._messages.popleft() if self._messages else None

    def _post(self, pair: ProcessPair, message: Message) -> Posted:
        """Pass a message to the process group."""
        raise NotImplementedError

    def _settle(self, pair: ProcessPair, posted: Posted) -> None:
        """Wait until a posted message was sent or received, and free its buffer. After the last
        message of a batch, end the batch."""
        job = posted.message.job
        pair.wait(posted.work, max(0.0, job.deadline - time.monotonic()) + _GRACE_S)
        self._has_moved(posted)
        if job.staged is None:
            self._buffers.append(posted.buffer)
        else:
            job.staged.release()
        if posted.message.is_last:
            self._end(job)

    def _has_moved(self, posted: Posted) -> None:
        """Process a message that was sent or received, before its buffer is reused."""
        raise NotImplementedError

    def _end(self, job: Job) -> None:
        """End a batch successfully after its last message was sent or received."""
        with self._changed:
            if self._error is not None:
                return
            self._jobs.remove(job)
        job.transfer.finish()

    # Breaking

    def _break(self, error: BatonError) -> None:
        """Break the link and fail all batches in flight. Errors of later calls are ignored."""
        with self._changed:
            if self._error is not None:
                return
            # A copy, because the caught exception refers to its frames.
            self._error = _copy(error)
            failed = [job for job in self._jobs if not job.writing]
            self._jobs.clear()
            self._messages.clear()
            store, pair = self._store, self._pair
            self._changed.notify_all()
        self._wake()
        for job in failed:
            job.transfer.fail(self._failure(job))
        if store is not None:
            store.fail(_copy(error))
        if pair is not None:
            pair.abort()

    def _failure(self, job: Job) -> BatonError:
        """Return the error with which a batch on a broken link ends."""
        error = self._error
        assert error is not None
        if time.monotonic() >= job.deadline:
            return DeadlineExceeded(
                f"a batch for {self._plan.peer} was not sent or received in time"
            )
        return WorkerFailed(error.message)

    def _told(self, error: Exception) -> BatonError:
        if isinstance(error, BatonError):
            return error
        reason = str(error).partition("\n")[0]
        return WorkerFailed(f"{self._plan.peer} is gone, or its connection failed: {reason}")


class GroupSendLink(_Link):
    """The writer's end of a link. Implements ``SendLink``."""

    def __init__(self, plan: LinkPlan, memory: BlockMemory) -> None:
        super().__init__(plan, memory)
        self._encryptor = Encryptor(plan.key)
        self._free: queue.SimpleQueue[StagingBuffer] = queue.SimpleQueue()
        self._unmade = BUFFERS - _MOVING

    def pack(self, number: int, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """Prepare parts of blocks for sending. It never waits for a buffer: if none is free, the
        mover encrypts the parts later. See ``SendLink``."""
        source = self._memory if memory is None else memory
        staged = self._stage(parts)
        if staged is None:
            for block in parts.blocks:
                check_part(source, block, parts.offset, parts.length)
            return Packed(parts, (), source)
        encrypt_parts(self._encryptor, source, number, parts, staged.buffer)
        return Packed(parts, (), staged)

    def send(self, number: int, packed: Packed, deadline_s: float) -> Transfer:
        """Start to send a batch that was announced. Cancelled batches are sent too, because the
        peer waits for them. See ``SendLink``."""
        deadline = time.monotonic() + deadline_s
        if isinstance(packed.payload, Staged):
            return self._submit(Job(number, packed.parts, deadline, staged=packed.payload))
        return self._submit(Job(number, packed.parts, deadline, memory=packed.payload))

    def _stage(self, parts: Parts) -> Staged | None:
        if len(parts.blocks) * wire_bytes(parts.length) > self._plan.message_bytes:
            return None
        with suppress(queue.Empty):
            return Staged(self._free.get_nowait(), self._free)
        with self._changed:
            if not self._unmade:
                return None
            self._unmade -= 1
        return Staged(self._new_buffer(), self._free)

    def _post(self, pair: ProcessPair, message: Message) -> Posted:
        job = message.job
        if job.staged is None:
            buffer = self._buffers.pop()
            assert job.memory is not None, "a batch must be staged or have memory"
            encrypt_parts(
                self._encryptor,
                job.memory,
                job.number,
                job.parts,
                buffer,
                message.first,
                message.count,
            )
        else:
            buffer = job.staged.buffer
        work = pair.send(buffer.tensor(message.bytes), job.number % MAX_TAG)
        return Posted(message, buffer, work)

    def _has_moved(self, posted: Posted) -> None:
        """Do nothing: for a writer, the receiver reports that the bytes have arrived."""


class GroupReceiveLink(_Link):
    """The receiver's end of a link. Implements ``ReceiveLink``."""

    def __init__(self, plan: LinkPlan, memory: BlockMemory) -> None:
        super().__init__(plan, memory)
        self._decryptor = Decryptor(plan.key)

    def receive(self, batch: AnnouncedBatch, deadline_s: float, *, wanted: bool = True) -> Transfer:
        """Start to bring a batch into its target blocks. A batch of several messages counts as
        running from the first one on. A cancel then waits for the last, or for the deadline. See
        ``ReceiveLink``."""
        deadline = time.monotonic() + deadline_s
        # An unwanted batch has no target, and its messages are received nevertheless.
        parts = batch.target if wanted else batch.source
        job = Job(batch.number, parts, deadline, batch=batch)
        if not wanted:
            job.transfer.cancel()
        return self._submit(job)

    def _post(self, pair: ProcessPair, message: Message) -> Posted:
        buffer = self._buffers.pop()
        work = pair.receive(buffer.tensor(message.bytes), message.job.number % MAX_TAG)
        return Posted(message, buffer, work)

    def _has_moved(self, posted: Posted) -> None:
        message, buffer = posted.message, posted.buffer
        job = message.job
        if not self._may_write(message):
            return
        error: BatonError | None = None
        try:
            buffer.download(message.bytes)
            self._write(message, buffer.view)
        except ChecksumMismatch as damage:
            error = damage
        finally:
            with self._changed:
                job.writing = False
                if self._error is not None:
                    error = self._failure(job)
            if error is not None:
                job.dropped = True
                job.transfer.fail(error)

    def _may_write(self, message: Message) -> bool:
        """Whether a message's parts may be written to their blocks. Otherwise the parts are
        dropped: the batch's transfer is over, or the link is broken."""
        job = message.job
        with self._changed:
            if self._error is not None or job.dropped:
                return False
            job.dropped = message.first == 0 and not job.transfer.begin()
            job.writing = not job.dropped
            return job.writing

    def _write(self, message: Message, view: memoryview) -> None:
        """Decrypt a message's parts, which are in ``view``, into their blocks. Raises
        ChecksumMismatch if a part is damaged.

        Stops early when the link is broken.
        """
        batch = message.job.batch
        assert batch is not None, "a receiver's job has a batch"
        step = wire_bytes(batch.target.length)
        for position in range(message.count):
            if self.is_broken:
                return
            data = view[position * step : (position + 1) * step]
            self._decryptor.decrypt(self._memory, batch, message.first + position, data)


def _seconds_to(*times: float | None) -> float | None:
    """Return the seconds until the earliest of some times of ``time.monotonic``; None if all are
    None."""
    known = [point for point in times if point is not None]
    return max(0.0, min(known) - time.monotonic()) if known else None


def _copy(error: BatonError) -> BatonError:
    return type(error)(error.message)
