"""Notices clients that hang up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client hung up: nobody is there to be answered."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled when the client hangs up.

    The request's body must have been read. Raises ClientGone and whatever ``work`` raises; when
    this returns, ``work`` has ended.
    """
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientGone
        return worker.result()
    finally:
        worker.cancel()
        watcher.cancel()
        # Cancelled work cleans up first: it tells the workers.
        await asyncio.gather(worker, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
