"""uvicorn's HTTP protocol with a bound on what a client may send as head, trailer or framing."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST_HEAD_BYTES = 64 << 10
"""Of a request's head; far more than any client sends."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses a head that does not end.

    The parser gathers a header until it is complete, however long it is, in time that grows with
    the square of its length: one client could fill the router's memory and stop everybody else.
    Bodies are bounded by their readers.
    """

    _unfinished = 0
    """Bytes since the parser has last completed a head, a piece of a body or a message."""

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished = 0
        super().on_message_complete()
