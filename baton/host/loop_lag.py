"""How late an event loop is: what whoever is called back waits for others that run on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NoReturn

LOOK_S = 0.1
"""How often it is looked: a loop that stands still for longer than this is seen for certain."""


async def watch_loop(observe: Callable[[float], None], every_s: float = LOOK_S) -> NoReturn:
    """Tell how many seconds later than asked for a timer of this loop came, every ``every_s``.

    Until it is cancelled.
    """
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, loop.time() - due))
