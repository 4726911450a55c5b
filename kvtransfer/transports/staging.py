"""Memory in which a writer keeps batches until their receivers have read them.

    free ─take→ taken ─release→ free

A receiver that reads late, after its pair has ended, finds other bytes: those of another batch,
encrypted by another key.
"""

from __future__ import annotations

import queue
import threading
import time
from bisect import insort
from collections.abc import Callable

import numpy as np

from baton.errors import HandoffError, WorkerFailed

_WAIT_S = 5.0
"""Maximum seconds to wait for room: longer than a receiver may be silent, which frees its
regions."""
_POLL_S = 0.001
Extent = tuple[int, int]
"""Offset and size of some bytes."""


class Region:
    """Bytes of a staging memory that hold one batch."""

    def __init__(self, at: int, view: memoryview, home: queue.SimpleQueue[Extent]) -> None:
        """``home`` is the queue to which the bytes return after use."""
        self.at = at
        """Offset of the region in the staging memory, in bytes."""
        self.view = view
        self._home: queue.SimpleQueue[Extent] | None = home

    def release(self) -> None:
        """Free the bytes; idempotent."""
        home, self._home = self._home, None
        if home is not None:
            home.put((self.at, self.view.nbytes))

    def __del__(self) -> None:
        # For a batch that was packed and never sent. A SimpleQueue is safe in a destructor.
        self.release()


class Staging:
    """The staging memory of all pairs in which a worker writes. Thread-safe."""

    def __init__(self, size: int) -> None:
        """``size`` is in bytes. The kernel provides only pages that were used."""
        self._data = np.empty(size, dtype=np.uint8)
        self._lock = threading.Lock()
        self._free: list[Extent] = [(0, size)]
        """Free extents in order; no two touch."""
        self._returned: queue.SimpleQueue[Extent] = queue.SimpleQueue()

    @property
    def address(self) -> int:
        """Address of the memory on the host."""
        return int(self._data.ctypes.data)

    @property
    def bytes(self) -> int:
        return self._data.nbytes

    def take(self, size: int, is_wanted: Callable[[], bool]) -> Region:
        """Return ``size`` bytes. Waits for room, some seconds at most.

        Raises HandoffError if the memory is smaller, and WorkerFailed if no room comes in time, or
        the region is no longer wanted.
        """
        if size > self.bytes:
            raise HandoffError(f"a batch of {size} bytes exceeds the staging of {self.bytes}")
        until = time.monotonic() + _WAIT_S
        while (at := self._fit(size)) is None:
            if not is_wanted():
                raise WorkerFailed("the pair was closed")
            if time.monotonic() >= until:
                raise WorkerFailed(f"the staging had no room for {size} bytes in {_WAIT_S} s")
            time.sleep(_POLL_S)
        return Region(at, self._data[at : at + size].data, self._returned)

    def _fit(self, size: int) -> int | None:
        """Cut ``size`` bytes off the first free extent that is large enough. Returns their
        offset."""
        with self._lock:
            while not self._returned.empty():
                self._put_back(self._returned.get_nowait())
            for position, (at, room) in enumerate(self._free):
                if room >= size:
                    rest = [(at + size, room - size)] if room > size else []
                    self._free[position : position + 1] = rest
                    return at
        return None

    def _put_back(self, extent: Extent) -> None:
        insort(self._free, extent)
        merged: list[Extent] = []
        for at, size in self._free:
            if merged and sum(merged[-1]) == at:
                before = merged.pop()
                merged.append((before[0], before[1] + size))
            else:
                merged.append((at, size))
        self._free = merged
