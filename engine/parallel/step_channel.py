"""How rank 0 tells the other ranks what to compute: a TCP connection to each, and who is alive.

    listening ─all ranks have come→ open ─a rank goes, is silent or a call fails→ broken → closed
                                    open ─close()→ closed

Rank 0 sends frames; an empty one says that it lives. The others send a byte now and then to say
so. Whoever hears nothing for too long, or finds the connection closed, calls ``on_broken`` once: a
group that has lost a rank is of no more use, and its processes are to end.

The first bytes of a connection are the group's token and the rank's number.
"""

from __future__ import annotations

import hmac
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from baton.errors import WorkerFailed

BEAT_S = 0.5
SILENT_RANK_S = 5.0
"""A rank that says nothing for so long, while it is connected, stands still: its whole worker ends,
before the leases of its handoffs and long before its requests are hopeless."""
SILENT_LEAD_S = 60.0
"""Rank 0 may stand still for a while and go on, as a worker of one rank may. It is not there any
more after this: its host has gone."""
_LENGTH = struct.Struct("<I")
_HELLO = struct.Struct("<32sI")
_MOST_BYTES = 1 << 28
_SEND_S = 30.0
"""A frame that a rank does not take for so long."""

OnBroken = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where the other ranks of a worker find rank 0."""

    host: str
    port: int
    token: str
    """32 hex digits that nobody else knows."""


class LeadChannel:
    """Rank 0's end. ``tell`` is the engine thread's; a thread of its own watches the ranks."""

    def __init__(self, host: str, ranks: int) -> None:
        """Listens from now on."""
        self.ranks = ranks
        self._token = secrets.token_hex(16)
        self._server = socket.create_server((host, 0))
        self.address = GroupAddress(host, self._server.getsockname()[1], self._token)
        self._peers: dict[int, socket.socket] = {}
        self._sending = threading.Lock()
        self._broken = threading.Event()
        self._closed = threading.Event()
        self._on_broken: OnBroken = lambda _: None
        self._watcher: threading.Thread | None = None

    def accept(self, deadline_s: float) -> None:
        """Wait for all ranks. Raises WorkerFailed where one does not come."""
        end = time.monotonic() + deadline_s
        while len(self._peers) < self.ranks - 1:
            self._server.settimeout(max(0.001, end - time.monotonic()))
            try:
                connection, _ = self._server.accept()
            except TimeoutError as error:
                missing = sorted(set(range(1, self.ranks)) - self._peers.keys())
                raise WorkerFailed(
                    f"ranks {missing} of {self.ranks} did not come within {deadline_s:.0f} s"
                ) from error
            self._greet(connection, max(0.001, end - time.monotonic()))
        self._server.close()

    def _greet(self, connection: socket.socket, timeout_s: float) -> None:
        """Take a rank in; anybody else is sent away."""
        connection.settimeout(min(timeout_s, SILENT_RANK_S))
        try:
            token, rank = _HELLO.unpack(_exactly(connection, _HELLO.size))
        except (OSError, EOFError):
            connection.close()
            return
        known = hmac.compare_digest(token, self._token.encode())
        if not known or rank in self._peers or not 0 < rank < self.ranks:
            connection.close()
            return
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(_SEND_S)
        self._peers[rank] = connection

    def watch(self, on_broken: OnBroken) -> None:
        """From now on ``on_broken`` is called, once and from any thread, when a rank is lost."""
        self._on_broken = on_broken
        self._watcher = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._watcher.start()

    def tell(self, frame: bytes) -> None:
        """Send a frame to all. Raises WorkerFailed where one does not take it."""
        if self._broken.is_set() or self._closed.is_set():
            raise WorkerFailed("the ranks of this worker are gone")
        message = _LENGTH.pack(len(frame)) + frame
        with self._sending:
            for rank, peer in self._peers.items():
                try:
                    peer.sendall(message)
                except OSError as error:
                    self.fail(f"rank {rank} takes no step: {error}")
                    raise WorkerFailed(f"rank {rank} takes no step: {error}") from error

    def fail(self, reason: str) -> None:
        """The group is of no more use; only the first reason counts."""
        if not self._broken.is_set() and not self._closed.is_set():
            self._broken.set()
            self._on_broken(reason)

    def _watch(self) -> None:
        heard = dict.fromkeys(self._peers, time.monotonic())
        numbers = {peer: rank for rank, peer in self._peers.items()}
        looked = time.monotonic()
        while not self._closed.wait(0.0) and not self._broken.is_set():
            self._beat()
            try:
                ready, _, _ = select.select(list(numbers), [], [], BEAT_S)
            except (OSError, ValueError):
                return  # closed
            now = time.monotonic()
            if now - looked > SILENT_RANK_S / 2:
                # This process stood still, and has not listened either.
                heard = dict.fromkeys(heard, now)
            looked = now
            for peer in ready:
                rank = numbers[peer]
                try:
                    said = peer.recv(256)
                except OSError:
                    said = b""
                if not said:
                    self.fail(f"rank {rank} has ended")
                    return
                heard[rank] = now
            for rank, at in heard.items():
                if now - at > SILENT_RANK_S:
                    self.fail(f"rank {rank} has said nothing for {now - at:.0f} s")
                    return
            # Beats come at their own pace.
            self._closed.wait(BEAT_S / 2)

    def _beat(self) -> None:
        # Whoever sends a step has the lock, and is a sign of life itself.
        if self._sending.acquire(blocking=False):
            try:
                # One that takes nothing at the moment has enough to read.
                _, able, _ = select.select([], list(self._peers.values()), [], 0)
                for peer in able:
                    with suppress(OSError):
                        peer.sendall(_LENGTH.pack(0))
            except (OSError, ValueError):
                return  # closed
            finally:
                self._sending.release()

    def close(self) -> None:
        """The ranks end when they notice; idempotent."""
        self._closed.set()
        self._server.close()
        for peer in self._peers.values():
            with suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(2 * BEAT_S)
        for peer in self._peers.values():
            peer.close()


class RankChannel:
    """Another rank's end. ``frame`` is the engine thread's; another thread says that it lives."""

    def __init__(self, address: GroupAddress, rank: int, deadline_s: float) -> None:
        """Connects. Raises WorkerFailed."""
        try:
            self._socket = socket.create_connection((address.host, address.port), deadline_s)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.settimeout(SILENT_LEAD_S)
            self._socket.sendall(_HELLO.pack(address.token.encode(), rank))
        except OSError as error:
            raise WorkerFailed(f"rank {rank} cannot reach rank 0: {error}") from error
        self._closed = threading.Event()

    @property
    def own_host(self) -> str:
        """The address by which this rank reaches the others."""
        return str(self._socket.getsockname()[0])

    def live(self, on_broken: OnBroken) -> None:
        """From now on say so; ``on_broken`` is called, once, when rank 0 has gone."""
        threading.Thread(
            target=self._live, args=(on_broken,), name="rank-beat", daemon=True
        ).start()

    def _live(self, on_broken: OnBroken) -> None:
        while not self._closed.wait(BEAT_S):
            try:
                self._socket.sendall(b"\x01")
            except OSError as error:
                if not self._closed.is_set():
                    on_broken(f"rank 0 has gone: {error}")
                return

    def frame(self) -> bytes | None:
        """The next one, however long that takes; None once rank 0 has gone or closed.

        Raises WorkerFailed where rank 0 says nothing for too long, or what no rank 0 says.
        """
        while True:
            try:
                (length,) = _LENGTH.unpack(_exactly(self._socket, _LENGTH.size))
                if length > _MOST_BYTES:
                    raise WorkerFailed(f"a frame of {length} bytes")
                frame = _exactly(self._socket, length)
            except TimeoutError as error:
                raise WorkerFailed(f"rank 0 has said nothing for {SILENT_LEAD_S:.0f} s") from error
            except (OSError, EOFError):
                return None
            if frame:
                return frame

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def _exactly(connection: socket.socket, size: int) -> bytes:
    """Raises EOFError where the other end has closed."""
    found = bytearray()
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            raise EOFError
        found += part
    return bytes(found)
