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
    this returns, ``work`` has ended: it has cleaned up and told the workers. It runs in the
    caller's own task.
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
        # Somebody else's cancellation, of the whole server say, goes on.
        if is_gone and not worker.uncancel():
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()
