"""An HTTP/2 client that sends arbitrary frames, valid or invalid.

It supports what an unauthenticated client needs: frames, uncompressed headers, and flow control of
sent data. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 1, 1, 4
_MAX_STREAMS, _INITIAL_WINDOW = 3, 4
_HEAD_BYTES = 9
_FRAME_BYTES = 16384
_WINDOW = 65535
_SEVEN_BITS = 127


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """Return the bytes of one HTTP/2 frame."""
    head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
    return head + payload


def header_block(fields: Iterable[tuple[str, str]]) -> bytes:
    """Return a header block whose fields are neither compressed nor indexed (RFC 7541, 6.2.2)."""
    return b"".join(
        b"\x00" + _text(name.encode()) + _text(value.encode(errors="surrogateescape"))
        for name, value in fields
    )


def _text(value: bytes) -> bytes:
    if len(value) < _SEVEN_BITS:
        return bytes((len(value),)) + value
    coded, rest = [_SEVEN_BITS], len(value) - _SEVEN_BITS
    while rest >= 128:
        coded.append(rest % 128 + 128)
        rest //= 128
    return bytes((*coded, rest)) + value


def call_headers(path: str, metadata: Iterable[tuple[str, str]] = ()) -> bytes:
    """Return the header block of a gRPC call."""
    fields = (
        *((":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "router")),
        *(("te", "trailers"), ("content-type", "application/grpc")),
        *metadata,
    )
    return header_block(fields)


class Http2Connection(asyncio.Protocol):
    """One HTTP/2 connection. On each stream it sends only what the flow-control windows allow."""

    def __init__(self) -> None:
        self.ended: set[int] = set()
        """Numbers of the streams that the server has ended."""
        self.answered: Counter[int] = Counter()
        """Number of DATA frames that the server has sent, by stream number."""
        self.max_streams = 0
        """Maximum number of concurrent streams that the server allows; 0 until the server has
        announced it."""
        self.closed = asyncio.Event()
        self.changed = asyncio.Event()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._window = _WINDOW
        self._initial_window = _WINDOW
        self._sent: Counter[int] = Counter()
        self._granted: Counter[int] = Counter()
        self._unsent: dict[int, int] = {}
        """Number of message bytes that the client still has to send, by stream number."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # uvloop's transports are not subclasses of asyncio's.
        self._transport = transport
        transport.write(PREFACE + frame(SETTINGS, 0, 0))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()
        self.changed.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while len(self._buffer) >= _HEAD_BYTES:
            length = int.from_bytes(self._buffer[:3], "big")
            if len(self._buffer) < _HEAD_BYTES + length:
                break
            kind, flags = self._buffer[3], self._buffer[4]
            stream = int.from_bytes(self._buffer[5:9], "big")
            payload = bytes(self._buffer[_HEAD_BYTES : _HEAD_BYTES + length])
            del self._buffer[: _HEAD_BYTES + length]
            self._take(kind, flags, stream, payload)
        self._send_more()
        self.changed.set()

    def send(self, data: bytes) -> None:
        """Send bytes as they are, valid HTTP/2 or not."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def call(self, stream: int, headers: bytes, message: bytes, unsent: int = 0) -> None:
        """Begin a call on a stream: send headers and a message. Then send ``unsent`` zero bytes, as
        fast as the flow-control windows allow.
        """
        end = 0 if unsent else END_STREAM
        size = (len(message) + unsent).to_bytes(4, "big")
        self.send(
            frame(HEADERS, END_HEADERS, stream, headers)
            + frame(DATA, end, stream, b"\x00" + size + message)
        )
        self._sent[stream] += 5 + len(message)
        self._window -= 5 + len(message)
        if unsent:
            self._unsent[stream] = unsent
            self._send_more()

    def close(self) -> None:
        """Close the connection."""
        if self._transport is not None:
            self._transport.abort()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            self.max_streams = 1 << 31
            for at in range(0, len(payload) - 5, 6):
                name = int.from_bytes(payload[at : at + 2], "big")
                value = int.from_bytes(payload[at + 2 : at + 6], "big")
                if name == _INITIAL_WINDOW:
                    self._initial_window = value
                elif name == _MAX_STREAMS:
                    self.max_streams = value
            self.send(frame(SETTINGS, ACK, 0))
        elif kind == PING and not flags & ACK:
            self.send(frame(PING, ACK, 0, payload))
        elif kind == WINDOW_UPDATE:
            granted = int.from_bytes(payload, "big")
            if stream:
                self._granted[stream] += granted
            else:
                self._window += granted
        elif kind == DATA:
            self.answered[stream] += 1
        if kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM):
            self.ended.add(stream)
            self._unsent.pop(stream, None)

    def _send_more(self) -> None:
        for stream, left in list(self._unsent.items()):
            window = self._initial_window + self._granted[stream] - self._sent[stream]
            size = min(left, window, self._window, _FRAME_BYTES)
            if size <= 0:
                continue
            self.send(frame(DATA, 0, stream, bytes(size)))
            self._sent[stream] += size
            self._window -= size
            self._unsent[stream] = left - size
