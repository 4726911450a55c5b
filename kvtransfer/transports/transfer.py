"""A transfer in flight, and all transfers of one link.

    pending ─begin→ placing ─pause→ pending (more of its bytes follow)
    placing ─finish→ done;  pending, placing ─fail→ failed
    pending ─cancel, give_up→ over at once;  placing ─cancel, give_up→ over with the next pause

While a transfer is *placing*, a thread of the transport writes bytes into blocks; nothing writes at
any other time. Thread-safe.
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
    """One batch in flight: what ``SendLink.send`` and ``ReceiveLink.receive`` return.

    The module's docstring shows its states.
    """

    def __init__(self) -> None:
        self.found: tuple[int, ...] = ()
        """Checksums of the placed parts. Empty if the writer's checksums were known when the parts
        were placed."""
        self._changed = threading.Condition()
        self._state = _State.PENDING
        self._error: BaseException | None = None
        self._wanted_end: BaseException | None = None
        self._calls: list[Callable[[Transfer], None]] = []

    # For threads that wait for the transfer

    @property
    def error(self) -> BaseException | None:
        """Why the transfer has failed, or CancelledError; None if it has not.

        A caller that keeps the transfer reads this instead of catching what ``poll`` raises. A
        caught error refers to its frames, which refer to the transfer, and only the garbage
        collector would free both.
        """
        with self._changed:
            return self._error

    def poll(self) -> bool:
        """Whether the transfer is over. If it has failed or was cancelled, raises its error or
        CancelledError."""
        with self._changed:
            over, error = self._state is _State.OVER, self._error
        if error is not None:
            raise error
        return over

    def wait(self, timeout_s: float) -> None:
        """Wait until the transfer is over. Raises the same errors as ``poll``, and TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._state is _State.OVER, timeout_s):
                raise TimeoutError(f"a transfer was not over after {timeout_s} s")
        self.poll()

    def cancel(self) -> None:
        """Cancel the transfer, because its result is no longer needed."""
        self.give_up(CancelledError())

    def give_up(self, error: BaseException) -> None:
        """End the transfer with an error, for example because its link has ended.

        If bytes are being placed, the transfer ends when ``pause`` is called next.
        """
        with self._changed:
            if self._state is _State.PLACING:
                self._wanted_end = self._wanted_end or error
                return
        self._end(error)

    def when_over(self, call: Callable[[Transfer], None]) -> None:
        """Call ``call`` when the transfer is over, on the thread that ends it. If the transfer is
        over already, call it at once."""
        with self._changed:
            if self._state is not _State.OVER:
                self._calls.append(call)
                return
        call(self)

    # For the transport

    def begin(self) -> bool:
        """Begin to place bytes in blocks. Returns False if the transfer is over; then no bytes may
        be placed."""
        with self._changed:
            if self._state is _State.PENDING:
                self._state = _State.PLACING
            return self._state is _State.PLACING

    def pause(self) -> None:
        """Record that no bytes are being placed at the moment. More bytes may follow."""
        with self._changed:
            if self._state is not _State.PLACING:
                return
            self._state = _State.PENDING
            wanted = self._wanted_end
        if wanted is not None:
            self._end(wanted)

    def finish(self) -> None:
        """End the transfer successfully. Has no effect if it is over already."""
        self._end(self._wanted_end)

    def fail(self, error: BaseException) -> None:
        """End the transfer with an error. Call this when no bytes are being placed. Has no effect
        if it is over already."""
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
    """The transfers in flight on one link. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: set[Transfer] = set()
        self._error: BatonError | None = None

    @property
    def error(self) -> BatonError | None:
        """The error that has ended the link; None while the link is open."""
        return self._error

    def new(self) -> Transfer:
        """Make a transfer of this link. If the link has ended, the transfer has already failed."""
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
        """End the link: fail all its transfers, including later ones, with ``error``. Errors of
        later calls are ignored."""
        with self._lock:
            if self._error is None:
                self._error = error
            rest, self._open = self._open, set()
        for transfer in rest:
            transfer.give_up(error)
