"""Shared by the tests of clients and by other tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from baton.client import (
    AsyncClient,
    Client,
    Piece,
)
from baton.rpc.grpc_channel import make_server
from router.access.access import Access
from tests.support.router.front_fakes import (
    MODEL,
    Front,
    add_grpc,
    batches_of,
    create_app,
    serve,
)


class OnThreads:
    """A blocking client with the methods of an asynchronous one."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._client, name)
        if name.startswith("stream_"):
            return lambda *args, **kwargs: self._pieces(method(*args, **kwargs))
        return lambda *args, **kwargs: asyncio.to_thread(method, *args, **kwargs)

    async def _pieces(self, pieces: Any) -> AsyncIterator[Piece]:
        try:
            while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                yield piece
        finally:
            await asyncio.to_thread(pieces.close)


@dataclass
class There:
    """A router's two servers."""

    front: Front
    http: str
    grpc: str

    @asynccontextmanager
    async def client(self, kind: str, key: str = "") -> AsyncIterator[Any]:
        """One of the two, as if it were asynchronous."""
        if kind == "async_grpc":
            async with AsyncClient(self.grpc, key) as client:
                yield client
        else:
            with Client(self.grpc, key) as blocking:
                yield OnThreads(blocking)


@asynccontextmanager
async def fronts(front: Front) -> AsyncIterator[There]:
    access = Access(front.config, front.metrics)
    parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    batches = batches_of(*parts)
    server = make_server()
    add_grpc(server, *parts)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await batches.start()
    try:
        async with serve(create_app(*parts, more=(batches.api,))) as address:
            yield There(front, f"http://{address}", f"127.0.0.1:{port}")
            await batches.stop()
            await batches.close()
    finally:
        await server.stop(0)
