"""A transfer under way.

    pending ─done→ done;  pending ─error→ failed;  pending ─cancel→ cancelled
    running (bytes are being put in place) ─→ done or failed: a cancel has to wait for its end

Safe among threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


class Transfer:
    """What ``send`` and ``receive`` return; the transport begins, finishes and fails it."""

    def __init__(self) -> None:
        self._future: Future[None] = Future()
        # Held while callbacks run, which may ask this transfer again.
        self._lock = threading.RLock()

    def poll(self) -> bool:
        """Whether it is over. Raises what it failed with, CancelledError if it was cancelled."""
        if not self._future.done():
            return False
        self._future.result()
        return True

    def cancel(self) -> bool:
        """End it, unless it is running: then it ends by itself at once. Whether it is cancelled."""
        with self._lock:
            return self._future.cancel()

    def wait(self, timeout_s: float) -> None:
        """Until it is over. Raises as ``poll``, and TimeoutError."""
        self._future.result(timeout_s)

    def when_over(self, call: Callable[[Transfer], None]) -> None:
        """Have ``call`` called when it is over, on whatever thread ends it."""
        self._future.add_done_callback(lambda _: call(self))

    def begin(self) -> bool:
        """The transport is about to put bytes in place. False: it was cancelled, or has failed."""
        with self._lock:
            return not self._future.done() and self._future.set_running_or_notify_cancel()

    def finish(self) -> None:
        """It is done; nothing happens if it is over already."""
        with self._lock:
            if not self._future.done():
                self._future.set_result(None)

    def fail(self, error: BaseException) -> None:
        """It has failed; nothing happens if it is over already."""
        with self._lock:
            if not self._future.done():
                self._future.set_exception(error)
