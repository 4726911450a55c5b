"""Ending tasks that run in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

log = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""The longest that a task may take to clean up after its cancellation."""
_AGAIN_S = 0.05


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
