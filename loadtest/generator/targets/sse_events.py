"""Server-sent events, cut out of a stream of bytes. Pure.

The format: HTML standard, section 9.2 (server-sent events). Names and ids of events are not kept,
since no OpenAI server gives a meaning to them.
"""

from __future__ import annotations

_DATA = b"data:"


class EventSplitter:
    """Takes pieces of a stream, wherever they were cut."""

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of those events that are complete by now, in order."""
        *lines, self._kept = (self._kept + data).split(b"\n")
        # A line for an event is all that these servers send; the empty line behind it says nothing.
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]
