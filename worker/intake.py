"""Whether a worker takes new work, and how much of what it took has not ended.

    open ─close()→ closed ─open()→ open (in another role, perhaps)

Owned by the event loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from baton.errors import Unavailable


class Intake:
    """Roles ask it before they take anything."""

    def __init__(self) -> None:
        self.is_open = True
        self.under_way = 0
        """Calls that were admitted and have not returned."""

    def close(self) -> None:
        """Take nothing more; idempotent."""
        self.is_open = False

    def open(self) -> None:
        """Take work again."""
        self.is_open = True

    def check(self) -> None:
        """Raises Unavailable where nothing is taken."""
        if not self.is_open:
            raise Unavailable("this worker is being drained and takes nothing more")

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """For the time that a call takes. Raises Unavailable before it begins."""
        self.check()
        self.under_way += 1
        try:
            yield
        finally:
            self.under_way -= 1
