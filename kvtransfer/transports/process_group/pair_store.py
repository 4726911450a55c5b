"""What the two processes of a pair tell each other while they form a process group.

It is a ``torch.distributed.Store`` over one connection of our own. torch's ``TCPStore`` would do
the same, but its client has no deadline: it hangs for as long as the process that hosts it is
stopped, and nothing in this process can end that.

The connection stays open while the pair lives: its end says that the other process is gone, which
NCCL over NVLink would not notice.
"""

from __future__ import annotations

import socket
import struct
import threading
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

from baton.errors import BatonError, DeadlineExceeded, HandoffError

FORM_S = 5.0
"""Longest wait for one value of the other process, in seconds: both ends are forming by then."""
_HEADER = struct.Struct("!HI")
_MAX_VALUE_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class PairStore(Store):
    """Values by key; each end sees its own and the other's. Safe among threads."""

    def __init__(self, connection: socket.socket) -> None:
        """``connection`` reaches the other end's store; the caller closes it."""
        super().__init__()
        connection.settimeout(FORM_S)
        self._connection = connection
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._error: BatonError | None = None
        self._arrived = bytearray()

    def set(self, key: str, value: bytes | str) -> None:
        """Raises OSError when the other end is gone."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._put(key, data)
        name = key.encode()
        with self._sending:
            self._connection.sendall(_HEADER.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """The value, once it is there. Raises as ``wait``."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Whether all of them are there."""
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Until all of them are there.

        Raises DeadlineExceeded after FORM_S seconds whatever torch allows, and what ``fail`` told.
        """
        seconds = FORM_S if timeout is None else min(FORM_S, timeout.total_seconds())
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self.check(keys), seconds)
            if self._error is not None:
                raise type(self._error)(self._error.message)
            if not self.check(keys):
                raise DeadlineExceeded(f"the other process did not form the pair in {seconds} s")

    def fail(self, error: BatonError) -> None:
        """End what waits, with this error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def receive(self) -> bool:
        """Take what has arrived; False: the other end has closed. Called when there is something.

        Raises HandoffError for what no store has sent, and OSError.
        """
        data = self._connection.recv(_READ_BYTES)
        self._arrived += data
        while self._take_value():
            pass
        return bool(data)

    def _take_value(self) -> bool:
        if len(self._arrived) < _HEADER.size:
            return False
        name, length = _HEADER.unpack_from(self._arrived)
        if length > _MAX_VALUE_BYTES:
            raise HandoffError(f"a value of {length} bytes came while a pair was formed")
        end = _HEADER.size + name + length
        if len(self._arrived) < end:
            return False
        key = bytes(self._arrived[_HEADER.size : _HEADER.size + name])
        value = bytes(self._arrived[_HEADER.size + name : end])
        del self._arrived[:end]
        self._put(key.decode(errors="replace"), value)
        return True

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
