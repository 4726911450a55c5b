"""A byte-level proxy between the processes and the store, whose wire can be treated badly.

It carries any number of connections to one address, and treats all of them alike. Owned by one
event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from baton.host.background import end_tasks

_PIECE = 1 << 16


@dataclass(frozen=True, slots=True)
class Wire:
    """How bytes cross. The default is a wire that is whole."""

    delay_s: float = 0.0
    """Each piece waits so long, either way."""
    there: bool = True
    """Whether callers' bytes arrive; else they are swallowed, and the connection stays open."""
    back: bool = True
    """Whether answers arrive."""
    broken: bool = False
    """Connections are reset, and new ones too."""


class Proxy:
    """Listens on a port of its own. Set ``wire`` by ``lay``."""

    def __init__(self, port: int) -> None:
        """``port``: of the loopback interface, where the bytes go."""
        self._to = port
        self._wire = Wire()
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    @property
    def port(self) -> int:
        """Where it listens."""
        assert self._server is not None, "not started"
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def carries(self) -> int:
        """How many connections are open."""
        return len(self._open)

    async def start(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def stop(self) -> None:
        """End every connection."""
        assert self._server is not None, "not started"
        self._server.close()
        await end_tasks(list(self._open))

    def lead_to(self, port: int) -> None:
        """From now on new connections go there."""
        self._to = port

    def lay(self, wire: Wire) -> None:
        """From now on bytes cross so. What was swallowed is lost: its connections are reset."""
        lost = not (self._wire.there and self._wire.back)
        self._wire = wire
        if wire.broken or lost:
            for writer in list(self._writers):
                writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None, "asyncio serves a connection in a task"
        self._open.add(task)
        self._writers.add(writer)
        try:
            if not self._wire.broken:
                await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            # The far end is gone, or the proxy ends: so does this connection.
            pass
        finally:
            self._open.discard(task)
            self._writers.discard(writer)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, onward = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers.add(onward)
        ways = [
            asyncio.create_task(self._pump(reader, onward, there=True)),
            asyncio.create_task(self._pump(there, writer, there=False)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # First: the task that waits for these tasks may be canceled.
            self._writers.discard(onward)
            onward.transport.abort()
            await end_tasks(ways)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, there: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_PIECE):
                if self._wire.delay_s:
                    await asyncio.sleep(self._wire.delay_s)
                if self._wire.there if there else self._wire.back:
                    writer.write(data)
                    await writer.drain()
