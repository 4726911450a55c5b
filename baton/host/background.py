"""Tasks of an event loop: their start and end, and how late the loop runs its timers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

log = logging.getLogger(__name__)

DEADLINE_S = 10.0
"""Maximum time that a task may take to clean up after its cancellation, in seconds."""
_AGAIN_S = 0.05
INLINE = 4096
"""Maximum work that runs on the event loop itself, in characters to tokenize or in tokens and
numbers to write. This amount takes about two milliseconds."""
LOOK_S = 0.1
"""Interval between two observations of the event loop's lag, in seconds. Every longer standstill of
the loop is observed."""


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

    They are cancelled again until they end: before Python 3.12 ``asyncio.wait_for`` loses a
    cancellation that meets the result it waits for.
    """
    pending = set(tasks)
    give_up = asyncio.get_running_loop().time() + DEADLINE_S
    while pending and asyncio.get_running_loop().time() < give_up:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=_AGAIN_S)
        for task in done:
            if not task.cancelled():
                # marks the exception as retrieved, so that asyncio does not log it
                task.exception()
    for task in pending:
        log.error("task %s does not end", task.get_name())


async def watch_loop(observe: Callable[[float], None], every_s: float = LOOK_S) -> NoReturn:
    """Call ``observe`` with the lag of this event loop, every ``every_s`` seconds, until cancelled.

    Lag is how late a timer fires, in seconds, because other callbacks hold the loop.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, loop.time() - due))


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """Run ``work``, whose length a client chooses: on the event loop if it is short, else on a
    thread.

    ``size`` is the length of the work, in the unit of ``INLINE``. Raises what ``work`` raises.
    """
    return work() if size <= INLINE else await asyncio.to_thread(work)
