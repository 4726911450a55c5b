"""Files and batches on disk, for an event loop: blocking work runs on a thread of its own.

    data folder/batches.sqlite     the table (router/batches/database.py)
    data folder/files/file-…       contents
    data folder/incoming/…         uploads in progress; renamed when they become files

Only their owner can read them: they contain prompts and answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from baton.errors import Overloaded
from baton.liveness.silence import SilenceWatch
from router.batches.batch import Batch, BatchStatus, StoredFile
from router.batches.database import Database
from router.batches.line import Fault
from router.batches.quota import Quota

P = ParamSpec("P")
T = TypeVar("T")

_PIECE_BYTES = 256 << 10
"""Size of the buffer in which an upload's data is collected before it is written, in bytes."""
_ROOM_BYTES = 8 << 20
"""Storage room that an upload reserves in advance, in bytes."""
MAX_UPLOADS = 64
"""Maximum number of uploads that one process receives at a time."""
MAX_UPLOADS_OF_TENANT = 4
"""Maximum number of uploads of one tenant that one process receives at a time."""
KEPT_S = 30 * 86400
"""Default time for which a file is kept, in seconds."""
ORPHAN_S = 3600.0
"""A file without a row, unchanged for this many seconds, was left by a crash."""


class Incoming:
    """An upload in progress. It is written to disk, and counts against the quota, as it grows.

    arriving ─flush→ checked ─keep→ a file; else it is removed when ``BatchStore.incoming`` ends.
    """

    def __init__(self, store: BatchStore, tenant: str, path: Path) -> None:
        """Create an upload; ``path`` names a new, empty file."""
        self.path = path
        self.tenant = tenant
        self.size = 0
        self._store = store
        self._room = 0
        self._gathered = bytearray()

    async def write(self, piece: bytes) -> None:
        """Append a piece to the upload. Raises RequestTooLarge if the quota has no room for the
        piece, and OSError."""
        self._gathered += piece
        if len(self._gathered) >= _PIECE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write the buffered data to disk. Raises RequestTooLarge if the quota has no room for it,
        and OSError."""
        data, self._gathered = self._gathered, bytearray()
        size = self.size + len(data)
        if size > self._room:
            self._room = await self._store.ask(
                Database.reserve,
                self.path.name,
                self.tenant,
                size,
                _ROOM_BYTES,
                self._store.quota,
            )
        await asyncio.to_thread(_append, self.path, data)
        self.size = size

    async def keep(self, filename: str, purpose: str, expires_s: int | None = None) -> StoredFile:
        """Turn the upload into a file that expires after ``expires_s`` seconds, by default
        ``KEPT_S``."""
        await self.flush()
        return await self._store.keep(self, filename, purpose, expires_s)


class BatchStore:
    """Files and batches on disk. A thread owns the connection to the database; the event loop owns
    this object."""

    def __init__(
        self, folder: Path, quota: Quota, unix_clock: Callable[[], float] = time.time
    ) -> None:
        """Create the store. Nothing is written to ``folder`` before the first file."""
        self.quota = quota
        self._folder = folder
        self._arriving: Counter[str] = Counter()
        """Number of uploads in progress, by tenant."""
        self._unix_clock = unix_clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        # Do not use file times: every file would look old if the clock were set forward.
        self._orphans = SilenceWatch[Path](ORPHAN_S)
        self._database: Database | None = None

    @property
    def used(self) -> bool:
        """Whether a file was ever uploaded."""
        return self._database is not None or self._table.exists()

    async def close(self) -> None:
        """Wait for pending writes, and close the table."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown()

    async def ask(
        self,
        method: Callable[Concatenate[Database, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the database, such as ``Database.batch``, on the database's thread."""
        return await self._on_thread(lambda: method(self._open(), *args, **kwargs))

    # Files

    @contextlib.asynccontextmanager
    async def incoming(self, tenant: str) -> AsyncIterator[Incoming]:
        """Receive a new file of a tenant. The file is removed at the end of the context, unless it
        is kept.

        Raises Overloaded if there are too many uploads.
        """
        if self._arriving[tenant] >= MAX_UPLOADS_OF_TENANT or self._arriving.total() >= MAX_UPLOADS:
            raise Overloaded("too many uploads are in progress; try again later", retry_after=1.0)
        self._arriving[tenant] += 1
        try:
            await self._on_thread(self._open)
            incoming = Incoming(self, tenant, self._incoming / secrets.token_hex(16))
            try:
                await asyncio.to_thread(_append, incoming.path, b"")
                yield incoming
            finally:
                await asyncio.shield(self._on_thread(lambda: self._drop([incoming.path])))
        finally:
            self._arriving[tenant] -= 1
            self._arriving += Counter()  # removes tenants without uploads

    async def keep(
        self, incoming: Incoming, filename: str, purpose: str, expires_s: int | None
    ) -> StoredFile:
        """Turn an upload into a file that expires after ``expires_s`` seconds. See
        ``Incoming.keep``."""
        now = int(self._unix_clock())
        expires_at = _expiry(now, expires_s)
        file = StoredFile(
            _file_id(), incoming.tenant, filename, purpose, incoming.size, now, expires_at
        )

        def work() -> None:
            _sync(incoming.path)
            # Write the contents first: a row without them would be invalid.
            self._rename(incoming.path, file)
            try:
                self._open().add_file(file, incoming.path.name)
            except BaseException:
                self.path(file).unlink(missing_ok=True)
                raise

        await self._on_thread(work)
        return file

    def _drop(self, paths: Sequence[Path]) -> None:
        """Remove uploads that are not kept, and free the room that they reserved."""
        for path in paths:
            path.unlink(missing_ok=True)
        self._open().release_uploads([path.name for path in paths])

    def path(self, file: StoredFile) -> Path:
        """Return the path of a file's contents."""
        return self._files / file.id

    async def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete a file. Raises NotFound, and InvalidRequest while a batch needs it."""

        def work() -> None:
            self._open().delete_file(file_id, tenant)
            (self._files / file_id).unlink(missing_ok=True)

        await self._on_thread(work)

    async def collect(self) -> None:
        """Delete the files that have expired and that no batch needs."""

        def work() -> None:
            for name in self._open().collect(int(self._unix_clock())):
                (self._files / name).unlink(missing_ok=True)

        await self._on_thread(work)

    async def sweep(self, now: float) -> None:
        """Remove files left by crashes. ``now`` is monotonic, in seconds."""

        def work() -> None:
            known = self._open().file_ids()
            paths = (*self._files.iterdir(), *self._incoming.iterdir())
            strays = {}
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    if path.name not in known:
                        strays[path] = (path.stat().st_mtime_ns, path.stat().st_size)
            self._drop(self._orphans.tick(strays, now))
            there = {path.name for path in self._incoming.iterdir()}
            self._open().release_uploads([*(self._open().uploads() - there)])

        await self._on_thread(work)

    # The end of a batch

    async def finish(
        self, held: Batch, status: BatchStatus, at: int, faults: Sequence[Fault] = ()
    ) -> Batch:
        """Write the results to files, and end the batch with ``status``. Raises LeaseLost.

        The work has its own thread and connection to the database, because it may write for
        seconds.
        """
        return await asyncio.to_thread(self._finish, held, status, at, faults)

    def _finish(self, held: Batch, status: BatchStatus, at: int, faults: Sequence[Fault]) -> Batch:
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
            changes: dict[str, object] = {"status": status, f"{status}_at": at, **names}
            if faults:
                changes["faults"] = tuple(faults)
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
        """Write a new, unregistered file to disk; return its path and size."""
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

    async def _on_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _append(path: Path, data: bytes | bytearray) -> None:
    """Append data to a file that only the owner of the file can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(data)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _expiry(created_at: int, expires_s: int | None) -> int:
    return created_at + (KEPT_S if expires_s is None else expires_s)


def _file_id() -> str:
    return f"file-{secrets.token_hex(12)}"
