"""Cancels work for clients that disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientGone(Exception):
    """The client has disconnected; there is no one to answer."""


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``, in the caller's task. It is cancelled when the client disconnects.

    The request's body must have been read. Raises ClientGone, and all that ``work`` raises, after
    ``work`` has ended and cleaned up.
    """
    worker = asyncio.current_task()
    assert worker is not None, "not in a task"
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        worker.cancel()

    watcher = asyncio.create_task(watch(), name="disconnect")
    try:
        return await work
    except asyncio.CancelledError:
        # A cancellation from elsewhere, such as the server's, continues.
        if is_gone and not worker.uncancel():
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
