"""A byte-level proxy for tests: what crosses the wire can be damaged or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

Change = Callable[[bytes], bytes]


@asynccontextmanager
async def proxy(address: str, change: Change) -> AsyncIterator[str]:
    """Yields the address of a proxy to ``address``; ``change`` sees what the caller sends."""
    host, port = address.rsplit(":", 1)
    connections: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(host, int(port))
        pumps = [
            asyncio.ensure_future(_pump(reader, back, change)),
            asyncio.ensure_future(_pump(there, writer, lambda data: data)),
        ]
        connections.update(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        for stream in (back, writer):
            stream.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, change: Change) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(change(data))
            await writer.drain()


def flip_one_byte(at_least: int) -> Change:
    """Flips a bit in the middle of the first piece of at least this number of bytes, once."""
    done = False

    def change(data: bytes) -> bytes:
        nonlocal done
        if done or len(data) < at_least:
            return data
        done = True
        damaged = bytearray(data)
        damaged[len(data) // 2] ^= 0x10
        return bytes(damaged)

    return change
