"""A router process's journal of bills: a file, so that they outlive the process.

    written ─Redis has it→ read over ─Redis has all→ gone, with the file's contents
    written ─the process dies→ another process of the cluster finds the file, and reports the bills

A process holds a lock on its journal while it lives. The file survives the process. It is written
without waiting for the disk, so a machine that loses its power may lose the last bills. Bills that
find no space wait in memory, until Redis has them.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_SUFFIX = ".bills2"
_SUFFIXES = (_SUFFIX, ".bills")
"""Names of journals of this version, and of Baton 0.1.0, which cannot read those of this one."""
_PIECE_BYTES = 64 << 10
"""Maximum size of the bills that are reported together, in bytes; one bill has some 300."""
_LARGE_BYTES = 1 << 20
"""Size in bytes above which a journal's file is emptied as soon as Redis has all bills in it."""
_PIECE_LINES = 200
_MAX_WAITING = 100_000
"""Maximum number of bills that wait in memory."""


class Journal:
    """The journal of one router process, or of a dead one. Owned by the router's event loop.
    Methods raise OSError."""

    def __init__(self, path: Path | None, descriptor: int) -> None:
        """Open a journal of bills. ``path`` None: the file is in memory, and is lost when the
        process ends."""
        self._path = path
        self._file = descriptor
        self._size = os.fstat(descriptor).st_size
        self._read_to = 0
        self._waiting: list[bytes] = []
        """Bills that found no space. They come after those of the file."""

    @classmethod
    def create(cls, folder: Path, cluster_id: str, writer: str) -> Journal:
        """Create the journal of a process. If the folder is not writable, log a warning and keep
        the journal in memory."""
        path = folder / f"{cluster_id}.{writer}{_SUFFIX}"
        fresh = path.with_suffix(".new")
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            # Lock the file before it gets the name by which other processes find it.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            fresh.rename(path)
        except OSError as error:
            log.warning(
                "%s cannot be written (%s): bills that are not in Redis yet are lost when this"
                " process ends; set data_dir to a folder that this user can write",
                folder,
                error.strerror,
            )
            return cls(None, os.memfd_create("bills"))
        return cls(path, descriptor)

    @classmethod
    def left(cls, folder: Path, cluster_id: str) -> Iterator[tuple[str, Journal]]:
        """Yield the journals of dead processes of a cluster, each with its writer's name."""
        every = (path for suffix in _SUFFIXES for path in folder.glob(f"{cluster_id}.*{suffix}"))
        for path in sorted(every):
            with contextlib.suppress(OSError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    os.close(descriptor)
                    continue
                yield path.stem[len(cluster_id) + 1 :], cls(path, descriptor)

    @property
    def has_more(self) -> bool:
        """Whether the journal has bills that ``read_over`` has not skipped."""
        return self._read_to < self._size or bool(self._waiting)

    @property
    def unwritten(self) -> int:
        """Return the number of bills that are in memory alone, and end with this process."""
        return len(self._waiting)

    def append(self, line: bytes) -> None:
        """Write a bill as a line, completely or not at all.

        If there is no space for it, it waits in memory, and so do those after it: Redis takes bills
        in their order.
        """
        if self._waiting:
            self._wait(line)
            return
        try:
            written = os.pwrite(self._file, line + b"\n", self._size)
        except OSError:
            written = 0
        if written <= len(line):
            os.ftruncate(self._file, self._size)
            log.warning("the journal of bills cannot be written; bills wait in memory for Redis")
            self._wait(line)
            return
        self._size += written

    def _wait(self, line: bytes) -> None:
        if len(self._waiting) >= _MAX_WAITING:
            raise OSError("the disk is full, and too many bills wait for Redis")
        self._waiting.append(line + b"\n")

    def lines(self) -> list[bytes]:
        """Return the next pending bills, some hundreds at most; none at the end."""
        if self._read_to >= self._size:
            return self._waiting[:_PIECE_LINES]
        room = min(_PIECE_BYTES, self._size - self._read_to)
        piece = os.pread(self._file, room, self._read_to)
        # A process that was killed may have left an incomplete line.
        return piece[: piece.rfind(b"\n") + 1].splitlines(keepends=True)

    def read_over(self, lines: list[bytes]) -> None:
        """Skip bills that Redis has received. They must be the first bills that ``lines`` has
        returned."""
        if self._read_to >= self._size:
            del self._waiting[: len(lines)]
        else:
            self._read_to += sum(map(len, lines))
        if not self.has_more and self._size > _LARGE_BYTES:
            os.ftruncate(self._file, 0)
            self._size = self._read_to = 0

    def close(self, *, remove: bool) -> None:
        """Close the journal's file; ``remove``: also delete it."""
        if remove and self._path is not None:
            self._path.unlink(missing_ok=True)
        os.close(self._file)
