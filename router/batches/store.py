"""Files and batches on the disk, for an event loop: what blocks runs on a thread of its own.

    data folder/batches.sqlite     the table (router/batches/database.py)
    data folder/files/file-…       contents
    data folder/incoming/…         what is being written; becomes a file by being renamed

Readable by their owner alone: they hold prompts and answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Concatenate, ParamSpec, TypeVar

from baton.liveness.silence import SilenceWatch
from router.batches.batch import Batch, BatchStatus, StoredFile
from router.batches.database import Database

P = ParamSpec("P")
T = TypeVar("T")

_COPY_BYTES = 1 << 20
ORPHAN_S = 3600.0
"""A file without a row that has not changed for this long is what a crash has left."""


class BatchStore:
    """The thread owns the connection; the event loop owns this object."""

    def __init__(
        self, folder: Path, max_bytes: int, unix_clock: Callable[[], float] = time.time
    ) -> None:
        """Nothing is written to ``folder`` before the first file comes. ``max_bytes`` bounds all

        files together.
        """
        self._folder = folder
        self._max_bytes = max_bytes
        self._unix_clock = unix_clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        # Not by file times: a wall clock that is set forward would make each file old.
        self._orphans = SilenceWatch[Path](ORPHAN_S)
        self._database: Database | None = None

    @property
    def used(self) -> bool:
        """Whether anybody has ever uploaded a file."""
        return self._database is not None or self._table.exists()

    async def close(self) -> None:
        """Wait for what is being written."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def ask(
        self,
        method: Callable[Concatenate[Database, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the table, ``Database.batch`` say, on the thread."""
        return await self._on_thread(lambda: method(self._open(), *args, **kwargs))

    # Files

    async def add_file(
        self,
        source: BinaryIO,
        tenant: str,
        filename: str,
        purpose: str,
        expires_s: int | None = None,
    ) -> StoredFile:
        """Keep a copy of ``source``, from its start, for so many seconds or until it is deleted.

        Raises RequestTooLarge where no room is.
        """

        database = await self._on_thread(self._open)
        # Beside the table's thread: a large file may take seconds.
        path, size = await asyncio.to_thread(self._write, _pieces(source))
        now = int(self._unix_clock())
        file = StoredFile(_file_id(), tenant, filename, purpose, size, now, _expiry(now, expires_s))

        def tell() -> None:
            database.add_file(file, self._max_bytes)

        return await self._on_thread(lambda: self._keep(path, file, tell))

    def path(self, file: StoredFile) -> Path:
        """Where its contents are."""
        return self._files / file.id

    async def delete_file(self, file_id: str, tenant: str) -> None:
        """Raises NotFound, and InvalidRequest while a batch needs it."""

        def work() -> None:
            self._open().delete_file(file_id, tenant)
            (self._files / file_id).unlink(missing_ok=True)

        await self._on_thread(work)

    async def collect(self) -> None:
        """Delete the files that have expired."""

        def work() -> None:
            for name in self._open().collect(int(self._unix_clock())):
                (self._files / name).unlink(missing_ok=True)

        await self._on_thread(work)

    async def sweep(self, now: float) -> None:
        """Remove what crashes have left. ``now`` is monotonic, in seconds."""

        def work() -> None:
            known = self._open().file_ids()
            paths = (*self._files.iterdir(), *self._incoming.iterdir())
            strays = {}
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    if path.name not in known:
                        strays[path] = (path.stat().st_mtime_ns, path.stat().st_size)
            for path in self._orphans.tick(strays, now):
                path.unlink(missing_ok=True)

        await self._on_thread(work)

    # The end of a batch

    async def finish(self, held: Batch, status: BatchStatus, at: int) -> Batch:
        """Make the results files, and end the batch with ``status``. Raises LeaseLost.

        On a thread and a connection of its own: it may write for seconds, and others go on.
        """
        return await asyncio.to_thread(self._finish, held, status, at)

    def _finish(self, held: Batch, status: BatchStatus, at: int) -> Batch:
        database = Database(self._table)
        try:
            names: dict[str, str] = {}
            files: list[StoredFile] = []
            for column, ok in (("output_file_id", True), ("error_file_id", False)):
                records = database.records(held.id, ok=ok)
                path, size = self._write(f"{record}\n".encode() for record in records)
                if not size:
                    path.unlink()
                    continue
                kind = "output" if ok else "error"
                name = f"{held.id}_{kind}.jsonl"
                expires_at = _expiry(at, held.output_expires_s)
                file = StoredFile(
                    _file_id(), held.tenant, name, "batch_output", size, at, expires_at
                )
                self._rename(path, file)
                files.append(file)
                names[column] = file.id
            changes = {"status": status, f"{status}_at": at, **names}
            try:
                return database.finish(held, files, **changes)
            except BaseException:
                for file in files:
                    self.path(file).unlink(missing_ok=True)
                raise
        finally:
            database.close()

    # On the disk

    @property
    def _table(self) -> Path:
        return self._folder / "batches.sqlite"

    @property
    def _files(self) -> Path:
        return self._folder / "files"

    @property
    def _incoming(self) -> Path:
        return self._folder / "incoming"

    def _open(self) -> Database:
        if self._database is None:
            for folder in (self._folder, self._files, self._incoming):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._database = Database(self._table)
        return self._database

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _write(self, pieces: Iterable[bytes]) -> tuple[Path, int]:
        """A file that nobody knows of yet, with these contents on the disk, and its size."""
        path = self._incoming / secrets.token_hex(16)
        size = 0
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for piece in pieces:
                    size += file.write(piece)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path, size

    def _rename(self, path: Path, file: StoredFile) -> None:
        path.replace(self.path(file))
        folder = os.open(self._files, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _keep(self, path: Path, file: StoredFile, tell: Callable[[], None]) -> StoredFile:
        """Contents first: a row without them would be a promise that cannot be kept."""
        self._rename(path, file)
        try:
            tell()
        except BaseException:
            self.path(file).unlink(missing_ok=True)
            raise
        return file

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _pieces(source: BinaryIO) -> Iterable[bytes]:
    source.seek(0)
    while piece := source.read(_COPY_BYTES):
        yield piece


def _expiry(created_at: int, expires_s: int | None) -> int | None:
    return None if expires_s is None else created_at + expires_s


def _file_id() -> str:
    return f"file-{secrets.token_hex(12)}"
