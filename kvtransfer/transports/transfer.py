"""A transfer under way.

    pending ─begin→ placing ─pause→ pending (more bytes of it are to come)
    placing ─finish→ done;  pending, placing ─fail→ failed
    pending ─cancel, give_up→ over at once;  placing ─cancel, give_up→ over with the next pause

While it is *placing*, a thread of the transport puts bytes into blocks; nobody does at any other
time. Safe among threads.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError


class _State(enum.Enum):
    PENDING = enum.auto()
    PLACING = enum.auto()
    OVER = enum.auto()


class Transfer:
    """What ``send`` and ``receive`` return; see the module's text."""

    def __init__(self) -> None:
        self.found: tuple[int, ...] = ()
        """Checksums of what was placed, where it was told of none that they should have."""
        self._changed = threading.Condition()
        self._state = _State.PENDING
        self._error: BaseException | None = None
        self._wanted_end: BaseException | None = None
        self._calls: list[Callable[[Transfer], None]] = []

    # For whoever waits for it

    def poll(self) -> bool:
        """Whether it is over. Raises what it failed with, CancelledError if it was cancelled."""
        with self._changed:
            over, error = self._state is _State.OVER, self._error
        if error is not None:
            raise error
        return over

    def wait(self, timeout_s: float) -> None:
        """Until it is over. Raises as ``poll``, and TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._state is _State.OVER, timeout_s):
                raise TimeoutError(f"a transfer was not over after {timeout_s} s")
        self.poll()

    def cancel(self) -> None:
        """Nobody wants it any more."""
        self.give_up(CancelledError())

    def give_up(self, error: BaseException) -> None:
        """It can come to nothing: its link has ended, for example."""
        with self._changed:
            if self._state is _State.PLACING:
                self._wanted_end = self._wanted_end or error
                return
        self._end(error)

    def when_over(self, call: Callable[[Transfer], None]) -> None:
        """Have ``call`` called when it is over, on whatever thread ends it; now if it is."""
        with self._changed:
            if self._state is not _State.OVER:
                self._calls.append(call)
                return
        call(self)

    # For the transport

    def begin(self) -> bool:
        """Bytes are about to be placed. False: it is over, and nothing may be."""
        with self._changed:
            if self._state is _State.PENDING:
                self._state = _State.PLACING
            return self._state is _State.PLACING

    def pause(self) -> None:
        """No bytes are being placed at the moment."""
        with self._changed:
            if self._state is not _State.PLACING:
                return
            self._state = _State.PENDING
            wanted = self._wanted_end
        if wanted is not None:
            self._end(wanted)

    def finish(self) -> None:
        """It is done; nothing happens if it is over already."""
        self._end(self._wanted_end)

    def fail(self, error: BaseException) -> None:
        """It has failed, and nothing is placed any more; nothing happens if it is over already."""
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        with self._changed:
            if self._state is _State.OVER:
                return
            self._state, self._error = _State.OVER, error
            calls, self._calls = self._calls, []
            self._changed.notify_all()
        for call in calls:
            call(self)
