"""Work whose length the client decides: on the event loop while it is short, else on a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

INLINE = 4096
"""Characters to tokenise, tokens or numbers to write: some two milliseconds of the event loop."""

T = TypeVar("T")


async def off_loop(size: int, work: Callable[[], T]) -> T:
    """What ``work`` returns, or raises; ``size`` says how long it is, in units of ``INLINE``."""
    return work() if size <= INLINE else await asyncio.to_thread(work)
