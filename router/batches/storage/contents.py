"""The bytes of files and of batches' results, by name: a folder, or a bucket with the S3 protocol.

    files/<file id>              an uploaded file, or the results of a batch
    parts/<batch id>/<part>      results of a running batch, if its state is in Redis
    identity                     the id of the state that these contents belong to, in Redis

Contents are written once, and never changed. ``folder/incoming`` is on a disk of this machine, or
on that of the folder: uploads and other files are written there before they get a name.

Methods block, and may be called by several threads.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol


class Reader(Protocol):
    """Contents that are being read."""

    def read(self, size: int, /) -> bytes:
        """Return the next bytes, at most ``size``; none at the end."""
        ...

    def close(self) -> None:
        """End reading."""


class Contents(Protocol):
    """Stores bytes by name. Methods raise OSError, and Unavailable if a server does not answer."""

    @property
    def incoming(self) -> Path:
        """The folder in which files are written before they are put here."""
        ...

    def prepare(self) -> None:
        """Create the folders. Called before the first file is written."""

    def put(self, path: Path, name: str) -> None:
        """Store the file ``path`` under ``name``, durably, and remove ``path``."""

    def delete(self, names: Iterable[str]) -> None:
        """Delete contents; those that do not exist are ignored."""

    def path(self, name: str) -> Path | None:
        """Return the path of contents that are in a folder of this machine; None if they are
        elsewhere."""
        ...

    def open(self, name: str) -> Reader:
        """Open contents, to read them from their beginning. Raises FileNotFoundError."""
        ...

    def signs(self) -> dict[str, str]:
        """Return the names of all contents, each with a text that changes when the contents do."""
        ...


class FolderContents:
    """Contents in a folder: of this machine, or on a volume that the machines of all routers
    share. Only its owner can read them: they contain prompts and answers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @property
    def incoming(self) -> Path:
        return self._folder / "incoming"

    def prepare(self) -> None:
        for folder in (self._folder, self._folder / "files", self.incoming):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, path: Path, name: str) -> None:
        _sync(path, os.O_RDONLY)
        target = self.path(name)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.replace(target)
        _sync(target.parent, os.O_RDONLY | os.O_DIRECTORY)

    def delete(self, names: Iterable[str]) -> None:
        for name in names:
            path = self.path(name)
            path.unlink(missing_ok=True)
            if path.parent.parent.name == "parts" and not any(path.parent.iterdir()):
                path.parent.rmdir()

    def path(self, name: str) -> Path:
        return self._folder / name

    def open(self, name: str) -> Reader:
        return self.path(name).open("rb")

    def signs(self) -> dict[str, str]:
        found = {}
        for path in (*self._folder.glob("files/*"), *self._folder.glob("parts/*/*")):
            if (sign := sign_of(path)) is not None:
                found[str(path.relative_to(self._folder))] = sign
        return found


def sign_of(path: Path) -> str | None:
    """Return a text that changes when the file ``path`` does; None if it does not exist."""
    try:
        state = path.stat()
    except FileNotFoundError:
        return None
    return f"{state.st_mtime_ns} {state.st_size}"


def _sync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
