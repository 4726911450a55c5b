"""The TCP connections through which rank 0 sends steps to the other ranks and detects lost ones.

    listening ─all ranks have connected→ open ─a rank is lost, is silent or a call fails→ broken
        → closed;
    open ─close()→ closed

Both sides send frames; an empty frame is a heartbeat. A side that receives nothing for too long, or
finds the connection closed, reports it once with the reason. A group that has lost a rank is
unusable, and its processes must end.

A rank's first frame is its ``Greeting``. When it is ready to compute, it sends another frame with
the address at which it serves other workers, if any.
"""

from __future__ import annotations

import hmac
import json
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import asdict, dataclass

from baton.errors import WorkerFailed
from baton.liveness.silence import SilenceWatch

BEAT_S = 0.5
SILENT_RANK_S = 5.0
"""Seconds without a frame after which a rank that computes counts as lost. Its whole worker then
ends, before the leases of its handoffs expire and before the deadlines of its requests."""
SILENT_LOADING_S = 30.0
"""Seconds without a frame after which a rank that is not ready yet counts as lost. Such a rank may
import and load without a break, and no step waits for it. A shorter limit would prevent workers
from starting on a busy host."""
SILENT_LEADER_S = 60.0
"""Seconds without a frame after which rank 0 counts as lost. Rank 0 may pause for a while and
continue, like a worker with one rank. After this time, the host of rank 0 is assumed to be gone."""
_LEADER_TICKS = 4
"""Number of times that a rank checks for frames from rank 0 within ``SILENT_LEADER_S``."""
_LENGTH = struct.Struct("<I")
_MAX_BYTES = 1 << 28
_MAX_GREETING = 4096
_SEND_S = 30.0
"""Maximum seconds for a rank to accept a frame from rank 0."""

OnBroken = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Address of rank 0, and the secret with which the other ranks of the worker connect to it."""

    host: str
    port: int
    token: str
    """Secret of 32 hex digits that a rank must send."""


@dataclass(frozen=True, slots=True)
class Greeting:
    """The first frame of a rank, which identifies it to rank 0."""

    token: str
    rank: int
    process: str
    """Name of the rank's process, which other code uses to end the process."""


class LeaderChannel:
    """Rank 0's end of the connections. The engine thread calls ``tell``; another thread watches the
    ranks."""

    def __init__(self, host: str, ranks: int) -> None:
        """Start to listen on ``host`` for the other ranks."""
        self.ranks = ranks
        self._token = secrets.token_hex(16)
        self._server = socket.create_server((host, 0))
        self.address = GroupAddress(host, self._server.getsockname()[1], self._token)
        self.greetings: dict[int, Greeting] = {}
        """Greetings of the ranks that have connected, by rank."""
        self._peers: dict[int, socket.socket] = {}
        self._sending = threading.Lock()
        self._closed = threading.Event()
        self.lost: Future[str] = Future()
        """Future whose result is the reason why the group of ranks has become unusable."""
        self._ready: dict[int, Future[str]] = {rank: Future() for rank in range(1, ranks)}
        self._watcher: threading.Thread | None = None

    def accept(self, deadline_s: float) -> None:
        """Wait until all ranks have connected. Raises WorkerFailed if one is missing after
        ``deadline_s`` seconds."""
        end = time.monotonic() + deadline_s
        while len(self._peers) < self.ranks - 1:
            try:
                self._server.settimeout(max(0.001, end - time.monotonic()))
                connection, _ = self._server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, self.ranks)) - self._peers.keys())
                raise WorkerFailed(
                    f"ranks {missing} of {self.ranks} did not connect within {deadline_s:.0f} s"
                ) from error
            except OSError as error:
                raise WorkerFailed(self._why()) from error
            self._greet(connection, max(0.001, end - time.monotonic()))
        self._server.close()

    def _greet(self, connection: socket.socket, timeout_s: float) -> None:
        """Check a new connection's greeting. A valid rank is accepted; other connections are
        closed."""
        connection.settimeout(min(timeout_s, SILENT_RANK_S))
        try:
            greeting = Greeting(**json.loads(_read_frame(connection, _MAX_GREETING)))
        except (OSError, EOFError, ValueError, TypeError):
            connection.close()
            return
        rank = greeting.rank
        known = hmac.compare_digest(str(greeting.token), self._token)
        if not known or rank in self._peers or rank not in self._ready:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SEND_S)
        self._peers[rank] = connection
        self.greetings[rank] = greeting

    def watch(self) -> None:
        """Start to watch the ranks: ``lost`` gets a reason as soon as one is lost."""
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def addresses(self, deadline_s: float) -> tuple[str, ...]:
        """Wait until all ranks are ready. Return the addresses at which ranks 1 and up serve other
        workers.

        Raises WorkerFailed.
        """
        end = time.monotonic() + deadline_s
        found = []
        for rank, ready in self._ready.items():
            while not ready.done():
                if self.lost.done():
                    raise WorkerFailed(self._why())
                if time.monotonic() > end:
                    raise WorkerFailed(f"rank {rank} was not ready within {deadline_s:.0f} s")
                with suppress(TimeoutError):
                    ready.result(BEAT_S)
            found.append(ready.result())
        return tuple(found)

    def _why(self) -> str:
        return self.lost.result() if self.lost.done() else "the ranks of this worker are gone"

    def tell(self, frame: bytes) -> None:
        """Send a frame to all other ranks. Raises WorkerFailed if a rank does not accept it."""
        if self.lost.done() or self._closed.is_set():
            raise WorkerFailed(self._why())
        message = _LENGTH.pack(len(frame)) + frame
        with self._sending:
            for rank, peer in self._peers.items():
                try:
                    peer.sendall(message)
                except OSError as error:
                    self.fail(f"rank {rank} does not accept steps: {error}")
                    raise WorkerFailed(f"rank {rank} does not accept steps: {error}") from error

    def fail(self, reason: str) -> None:
        """Mark the group of ranks as unusable; only the first reason is kept. Any thread may call
        this."""
        if self._closed.is_set():
            return
        with suppress(InvalidStateError):
            self.lost.set_result(reason)
        with suppress(OSError):
            # Wakes a thread that waits for ranks.
            self._server.shutdown(socket.SHUT_RDWR)

    def _watch(self) -> None:
        heard = dict.fromkeys(self._peers, 0)
        numbers = {peer: rank for rank, peer in self._peers.items()}
        heard_bytes = {rank: bytearray() for rank in self._peers}
        ready_ones, loading = SilenceWatch[int](SILENT_RANK_S), SilenceWatch[int](SILENT_LOADING_S)
        while not self._closed.is_set() and not self.lost.done():
            self._beat()
            try:
                ready, _, _ = select.select(list(numbers), [], [], BEAT_S)
            except (OSError, ValueError):
                return  # closed
            for peer in ready:
                rank = numbers[peer]
                try:
                    said = peer.recv(_MAX_GREETING)
                except OSError:
                    said = b""
                if not said:
                    self.fail(f"rank {rank} has ended")
                    return
                heard[rank] += 1
                heard_bytes[rank] += said
                self._take(rank, heard_bytes[rank])
            now = time.monotonic()
            computing = {rank: n for rank, n in heard.items() if self._ready[rank].done()}
            for watch, signs in (ready_ones, computing), (loading, heard):
                for rank in watch.tick(signs, now):
                    self.fail(f"rank {rank} was silent for {watch.limit_s:.0f} s")
                    return
            # The interval of checks does not depend on the rate of beats.
            self._closed.wait(BEAT_S / 2)

    def _take(self, rank: int, said: bytearray) -> None:
        """Process the complete frames in ``said``, the buffer of bytes that a rank has sent, and
        remove them from it."""
        while len(said) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(said)
            end = _LENGTH.size + length
            if length > _MAX_GREETING:
                self.fail(f"rank {rank} sent an invalid frame")
                said.clear()
            if len(said) < end:
                return
            if length:
                with suppress(InvalidStateError, UnicodeDecodeError):
                    self._ready[rank].set_result(said[_LENGTH.size : end].decode())
            del said[:end]

    def _beat(self) -> None:
        # A thread that sends a step has the lock, and the step is itself a sign of life.
        if self._sending.acquire(blocking=False):
            try:
                # A rank whose buffer is full has enough to read.
                _, able, _ = select.select([], list(self._peers.values()), [], 0)
                for peer in able:
                    with suppress(OSError):
                        peer.sendall(_LENGTH.pack(0))
            except (OSError, ValueError):
                return  # closed
            finally:
                self._sending.release()

    def close(self) -> None:
        """Close the connections, which ends the other ranks; idempotent."""
        self._closed.set()
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(2 * BEAT_S)
        for peer in self._peers.values():
            peer.close()


class FollowerChannel:
    """Another rank's end of its connection to rank 0. The engine thread calls ``frame``; another
    thread sends heartbeats."""

    def __init__(
        self, address: GroupAddress, rank: int, deadline_s: float, process: str = ""
    ) -> None:
        """Connect to rank 0 at ``address``, and send the greeting. Raises WorkerFailed."""
        self._sending = threading.Lock()
        try:
            self._socket = socket.create_connection((address.host, address.port), deadline_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(SILENT_LEADER_S / _LEADER_TICKS)
            greeting = Greeting(address.token, rank, process)
            self._send(json.dumps(asdict(greeting)).encode())
        except OSError as error:
            raise WorkerFailed(f"rank {rank} cannot reach rank 0: {error}") from error
        self._closed = threading.Event()
        self._silence = SilenceWatch[int](SILENT_LEADER_S)
        self._frames = 0

    def _send(self, frame: bytes) -> None:
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def ready(self, address: str) -> None:
        """Report to rank 0 that this rank can compute steps, and the address at which it serves
        other workers. Raises WorkerFailed."""
        try:
            self._send(address.encode())
        except OSError as error:
            raise WorkerFailed(f"rank 0 is gone: {error}") from error

    @property
    def own_host(self) -> str:
        """Local address of the connection to rank 0, at which the other ranks can reach this
        one."""
        return str(self._socket.getsockname()[0])

    def live(self, on_broken: OnBroken) -> None:
        """Start to send heartbeats. ``on_broken`` is called once, when rank 0 is gone."""
        threading.Thread(
            target=self._live, args=(on_broken,), name="rank-beat", daemon=True
        ).start()

    def _live(self, on_broken: OnBroken) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self._send(b"")
            except OSError as error:
                if not self._closed.is_set():
                    on_broken(f"rank 0 is gone: {error}")
                return

    def frame(self) -> bytes | None:
        """Wait for the next frame from rank 0, without a limit. Returns None once rank 0 is gone or
        has closed the connection.

        Raises WorkerFailed if nothing arrives for too long, not even a heartbeat, or if a frame is
        invalid.
        """
        while True:
            self._wait(0)
            try:
                frame = _read_frame(self._socket, _MAX_BYTES, self._wait)
            except ValueError as error:
                raise WorkerFailed(f"rank 0 sent an invalid frame: {error}") from error
            except TimeoutError as error:
                raise WorkerFailed(f"rank 0 was silent for {SILENT_LEADER_S:.0f} s") from error
            except (OSError, EOFError):
                return None
            self._frames += 1
            if frame:
                return frame

    def _wait(self, read: int) -> None:
        """At a timeout, check for how long no bytes have arrived. ``read`` is the number of bytes
        of the current frame that have arrived.

        Raises TimeoutError once nothing has arrived for ``SILENT_LEADER_S`` seconds.
        """
        if self._silence.tick({0: (self._frames, read)}, time.monotonic()):
            raise TimeoutError

    def close(self) -> None:
        """Close the connection to rank 0; idempotent."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _read_frame(
    connection: socket.socket, most: int, wait: Callable[[int], None] | None = None
) -> bytes:
    """Read one frame of at most ``most`` bytes. At each timeout, ``wait`` is called with the number
    of bytes read so far.

    Raises EOFError if the other end has closed, ValueError for more than ``most`` bytes, and
    TimeoutError at the first timeout if ``wait`` is None.
    """
    (length,) = _LENGTH.unpack(_exactly(connection, _LENGTH.size, wait))
    if length > most:
        raise ValueError(f"a frame of {length} bytes is too long")
    return _exactly(connection, length, wait)


def _exactly(
    connection: socket.socket, size: int, wait: Callable[[int], None] | None = None
) -> bytes:
    """Read exactly ``size`` bytes. Raises EOFError if the other end has closed the connection."""
    found = bytearray()
    while len(found) < size:
        try:
            part = connection.recv(size - len(found))
        except TimeoutError:
            if wait is None:
                raise
            wait(len(found))
            continue
        if not part:
            raise EOFError
        found += part
    return bytes(found)
