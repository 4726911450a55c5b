from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.chaos.harness.proxy import Proxy, Wire

DEADLINE_S = 60.0


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[Proxy, list[bytes]]]:
    """A proxy to a server that answers what it hears, and all that was heard."""
    heard: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(100):
            heard.append(data)
            writer.write(data)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    proxy = Proxy(server.sockets[0].getsockname()[1])
    await proxy.start()
    try:
        yield proxy, heard
    finally:
        await proxy.stop()
        server.close()


async def ask(proxy: Proxy) -> bytes:
    """One question on a connection of its own; empty where it ends without an answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(b"a")
        async with asyncio.timeout(DEADLINE_S):
            return await reader.read(100)
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


@pytest.mark.parametrize("wire", [Wire(), Wire(delay_s=0.01)], ids=["whole", "slow"])
async def test_bytes_cross(wire: Wire) -> None:
    async with proxied() as (proxy, heard):
        proxy.lay(wire)
        assert await ask(proxy) == b"a"
        assert heard == [b"a"]


async def test_connections_are_reset() -> None:
    async with proxied() as (proxy, heard):
        proxy.lay(Wire(broken=True))
        assert await ask(proxy) == b""
        assert heard == []
        proxy.lay(Wire())
        assert await ask(proxy) == b"a"


@pytest.mark.parametrize(
    ("wire", "arrives"),
    [(Wire(back=False), [b"a"]), (Wire(there=False), [])],
    ids=["no answer", "no question"],
)
async def test_a_half_open_connection_is_silent_and_does_not_outlive_it(
    wire: Wire, arrives: list[bytes]
) -> None:
    async with proxied() as (proxy, heard):
        proxy.lay(wire)
        asking = asyncio.create_task(ask(proxy))
        async with asyncio.timeout(DEADLINE_S):
            while len(heard) < len(arrives) or not proxy.carries:
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        assert not asking.done()
        proxy.lay(Wire())
        assert await asking == b""
        assert heard == arrives
        assert await ask(proxy) == b"a"
