"""Background tasks: how they start, so that an error is logged, and how they end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

log = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""The longest that a task may take to clean up after its cancellation."""
_AGAIN_S = 0.05


def spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    """Start a task that no caller awaits; an error that ends it is logged."""
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_death)
    return task


def _log_death(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("task %s has died", task.get_name(), exc_info=error)


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is dropped.

    They are cancelled again until they end: before Python 3.12 ``asyncio.wait_for``, inside which
    redis-py sends its commands, loses a cancellation that meets the result it waits for.
    """
    pending = set(tasks)
    give_up = asyncio.get_running_loop().time() + DEADLINE_S
    while pending and asyncio.get_running_loop().time() < give_up:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # looked at, so that asyncio does not log it
    for task in pending:
        log.error("task %s does not end", task.get_name())
