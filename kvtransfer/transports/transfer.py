"""A transfer under way, and all of one link's.

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

from baton.errors import BatonError


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


class OpenTransfers:
    """The transfers of one link. Safe among threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Transfer] = set()
        self._error: BatonError | None = None

    @property
    def error(self) -> BatonError | None:
        """What has ended the link, if anything has."""
        return self._error

    def new(self) -> Transfer:
        """A transfer; on a link that has ended it has failed already."""
        transfer = Transfer()
        with self._lock:
            if self._error is None:
                self._open.add(transfer)
        if self._error is not None:
            transfer.fail(self._error)
        transfer.when_over(self._forget)
        return transfer

    def _forget(self, transfer: Transfer) -> None:
        with self._lock:
            self._open.discard(transfer)

    def end(self, error: BatonError) -> None:
        """Fail all, and every one to come; the first error counts."""
        with self._lock:
            if self._error is None:
                self._error = error
            rest, self._open = self._open, set()
        for transfer in rest:
            transfer.give_up(error)
