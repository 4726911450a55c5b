"""Files and batches for an event loop: blocking work runs on threads.

    one host       data_dir/batches.sqlite, and contents in data_dir
    several hosts  Redis, and contents on a volume that all share, or in a bucket

``router.batches.storage.contents`` lists the names of contents. An upload is in ``incoming`` until
it becomes a file.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import shutil
import sqlite3
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, Concatenate, ParamSpec, TypeVar, cast

import redis

from baton.errors import NotFound, Overloaded, RequestTooLarge, StorageFull, Unavailable
from baton.liveness.silence import SilenceWatch
from router.batches.storage.batch import Batch, BatchStatus, Fault, LineResult, StoredFile
from router.batches.storage.contents import Contents, FolderContents, sign_of
from router.batches.storage.database import Database, LeaseLost
from router.batches.storage.disk_errors import storage_error
from router.batches.storage.quota import Quota
from router.batches.storage.redis_database import RedisDatabase
from router.batches.storage.sqlite_database import SqliteDatabase

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

_PIECE_BYTES = 256 << 10
"""Size of the pieces in which files are received and sent, in bytes."""
_ROOM_BYTES = 8 << 20
"""Storage room that an upload reserves in advance, in bytes."""
MAX_UPLOADS = 64
"""Maximum number of uploads that one process receives at a time."""
MAX_UPLOADS_OF_TENANT = 4
"""Maximum number of uploads of one tenant that one process receives at a time."""
KEPT_S = 30 * 86400
"""Default time for which a file is kept, in seconds."""
ORPHAN_S = 3600.0
"""Contents, an upload or its reservation that nothing refers to, unchanged for this many seconds,
were left by a crash."""
SHARED_GATHER_S = 1.0
"""Time for which results are gathered before they are stored in a bucket or on a shared volume, in
seconds. A router that is killed runs the lines of this time again."""
_ASK_S = 10.0
"""Maximum time of a call of the state in Redis, with the wait for a thread, in seconds."""
_CALLS, _WORKERS = 8, 24
"""Number of threads for calls of the state in Redis, and for contents."""
_RETRY_S = 2.0


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
        piece, and StorageFull."""
        self._gathered += piece
        if len(self._gathered) >= _PIECE_BYTES:
            await self.flush()

    async def flush(self) -> None:
        """Write the buffered data to disk. Raises RequestTooLarge if the quota has no room for it,
        and StorageFull."""
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
        await self._store.work(_append, self.path, data)
        self.size = size

    async def keep(self, filename: str, purpose: str, expires_s: int | None = None) -> StoredFile:
        """Turn the upload into a file that expires after ``expires_s`` seconds, by default
        ``KEPT_S``."""
        await self.flush()
        return await self._store.keep(self, filename, purpose, expires_s)


class BatchStore:
    """Files and batches. Owned by the event loop. All methods that write raise StorageFull if the
    disk is full or read-only.

    One thread owns the connection to SQLite. Calls of Redis have several threads, and so has
    everything that reads or writes contents.
    """

    def __init__(
        self,
        make: Callable[[], Database],
        contents: Contents,
        quota: Quota,
        unix_clock: Callable[[], float] = time.time,
        *,
        table: Path | None = None,
    ) -> None:
        """Create the store. ``make`` connects to the state. ``table`` is the file of the state;
        None: the state is in Redis, and its connections may be used by several threads."""
        self.quota = quota
        self.gather_s = 0.0 if table else SHARED_GATHER_S
        """Time for which results are gathered before they are stored together, in seconds."""
        self._make = make
        self._contents = contents
        self._table = table
        self._unix_clock = unix_clock
        self._arriving: Counter[str] = Counter()
        """Number of uploads in progress, by tenant."""
        self._calls = ThreadPoolExecutor(1 if table else _CALLS, thread_name_prefix="batches")
        self._workers = ThreadPoolExecutor(_WORKERS, thread_name_prefix="batch-files")
        self._slow_calls = self._calls if table else self._workers
        """Where calls of the state run that also use contents."""
        self._ask_s = None if table else _ASK_S
        # Do not use file times: every file would look old if the clock were set forward.
        self._orphans = SilenceWatch[str](ORPHAN_S)
        self._opening = threading.Lock()
        self._database: Database | None = None

    @classmethod
    def local(
        cls, folder: Path, quota: Quota, unix_clock: Callable[[], float] = time.time
    ) -> BatchStore:
        """Create a store for the router processes of one host. Nothing is written to ``folder``
        before the first file."""
        table = folder / "batches.sqlite"
        contents = FolderContents(folder)
        return cls(lambda: SqliteDatabase(table), contents, quota, unix_clock, table=table)

    @classmethod
    def shared(
        cls,
        redis_url: str,
        cluster_id: str,
        contents: Contents,
        quota: Quota,
        unix_clock: Callable[[], float] = time.time,
    ) -> BatchStore:
        """Create a store for the routers of a cluster on any number of hosts."""
        return cls(
            lambda: RedisDatabase(redis_url, cluster_id, contents), contents, quota, unix_clock
        )

    @property
    def used(self) -> bool:
        """Whether a file may have been uploaded."""
        return self._table is None or self._database is not None or self._table.exists()

    async def close(self) -> None:
        """Wait for pending writes, and close the connection."""
        await asyncio.get_running_loop().run_in_executor(self._calls, self._close)
        for pool in (self._calls, self._workers):
            await asyncio.to_thread(pool.shutdown)

    async def ask(
        self,
        method: Callable[Concatenate[Database, P], T],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Call a method of the state, such as ``Database.batch``. Raises Unavailable if Redis does
        not answer."""

        def call() -> T:
            found: T = getattr(self._open(), method.__name__)(*args, **kwargs)
            return found

        try:
            async with asyncio.timeout(self._ask_s):
                return await self._on(self._calls, call)
        except TimeoutError:
            raise _no_answer("TimeoutError") from None

    async def work(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that reads or writes files, on a thread."""
        return await self._on(self._workers, lambda: call(*args, **kwargs))

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
            await self._on(self._calls, self._open)
            path = self._contents.incoming / secrets.token_hex(16)
            incoming = Incoming(self, tenant, path)
            try:
                await self.work(_append, path, b"")
                yield incoming
            finally:
                await asyncio.shield(self._drop(path))
        finally:
            self._arriving[tenant] -= 1
            self._arriving += Counter()  # removes tenants without uploads

    async def _drop(self, path: Path) -> None:
        """Remove an upload that is not kept, and free the room that it reserved."""
        await self.work(path.unlink, missing_ok=True)
        # If Redis does not answer, or the disk is full, the reservation ends as after a crash.
        with contextlib.suppress(Unavailable, StorageFull):
            await self.ask(Database.release_uploads, [path.name])

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
        # Write the contents first: a record without them would be invalid.
        await self.work(self._contents.put, incoming.path, _name(file))
        try:
            await self.ask(Database.add_file, file, incoming.path.name, self.quota)
        except (RequestTooLarge, StorageFull, sqlite3.Error):
            await self.work(self._contents.delete, [_name(file)])
            raise
        return file

    def path(self, file: StoredFile) -> Path | None:
        """Return the path of a file's contents; None if they are in a bucket."""
        return self._contents.path(_name(file))

    async def pieces(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Open a file's contents, and return an iterator over them. Raises FileNotFoundError and
        Unavailable."""
        reader = await self.work(self._contents.open, _name(file))

        async def read() -> AsyncIterator[bytes]:
            try:
                while piece := await self.work(reader.read, _PIECE_BYTES):
                    yield piece
            finally:
                reader.close()

        return read()

    @contextlib.asynccontextmanager
    async def reading(self, file: StoredFile) -> AsyncIterator[BinaryIO]:
        """Open a file's contents on this machine, until the end of the context. Raises
        FileNotFoundError and Unavailable."""
        opened = await self.work(self._fetch, _name(file))
        try:
            yield opened
        finally:
            opened.close()

    def _fetch(self, name: str) -> BinaryIO:
        path = self._contents.path(name)
        if path is not None:
            return path.open("rb")
        with closing(self._contents.open(name)) as reader:
            # It has no name, so that it is gone when this process ends.
            copy = cast(BinaryIO, tempfile.TemporaryFile(dir=self._contents.incoming))  # noqa: SIM115
            try:
                shutil.copyfileobj(cast(BinaryIO, reader), copy, _PIECE_BYTES)
                copy.seek(0)
            except BaseException:
                copy.close()
                raise
        return copy

    async def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete a file. Raises NotFound, and InvalidRequest while a batch needs it."""
        await self.ask(Database.delete_file, file_id, tenant)
        await self.work(self._contents.delete, [f"files/{file_id}"])

    async def collect(self) -> None:
        """Delete the files that have expired and that no batch needs."""
        gone = await self.ask(Database.collect, int(self._unix_clock()))
        if gone:
            await self.work(self._contents.delete, [f"files/{name}" for name in gone])

    async def sweep(self, now: float) -> None:
        """Remove what crashes have left. ``now`` is monotonic, in seconds."""
        await self._on(self._slow_calls, lambda: self._sweep(now))

    def _sweep(self, now: float) -> None:
        database, contents = self._open(), self._contents
        signs = {f"upload/{name}": str(size) for name, size in database.uploads().items()}
        for path in contents.incoming.iterdir():
            if (sign := sign_of(path)) is not None:
                signs[f"incoming/{path.name}"] = sign
        if self._owns_contents(database):
            kept = database.content_ids()
            for name, sign in contents.signs().items():
                if name.split("/")[1] not in kept:
                    signs[name] = sign
        left = self._orphans.tick(signs, now)
        strays = [name for name in left if not name.startswith(("upload/", "incoming/"))]
        for name in left:
            if name.startswith("incoming/"):
                (contents.incoming / name.removeprefix("incoming/")).unlink(missing_ok=True)
        database.release_uploads(
            [name.removeprefix("upload/") for name in left if name.startswith("upload/")]
        )
        contents.delete(strays)

    def _owns_contents(self, database: Database) -> bool:
        """Return whether the contents belong to this state. They do not if Redis has lost the
        state, or if another cluster uses the same place: then nothing there is removed."""
        identity = database.identity()
        if not identity:
            return True
        try:
            with closing(self._contents.open("identity")) as reader:
                found = reader.read(len(identity) + 1).decode(errors="replace")
        except FileNotFoundError:
            path, _ = self._write([identity.encode()])
            self._contents.put(path, "identity")
            return True
        if found != identity:
            log.error(
                "files and batches: the contents in batch_store belong to another state, %s, than"
                " Redis has, %s: has Redis lost its data, or does another cluster use this"
                " batch_store? No contents are removed. To give up the unknown ones, delete the"
                " file 'identity' there",
                found,
                identity,
            )
        return found == identity

    # Results

    async def add_results(self, held: Batch, results: Sequence[LineResult]) -> None:
        """Store results of a batch for its owner. Raises LeaseLost, NoSpace and Unavailable."""
        await self._on(
            self._slow_calls, lambda: self._open().add_results(held, results, self.quota)
        )

    async def finish(
        self, held: Batch, status: BatchStatus, at: int, faults: Sequence[Fault] = ()
    ) -> Batch:
        """Write the results to files, and end the batch with ``status``. Raises LeaseLost.

        The work has its own connection to the state, because it may write for seconds.
        """
        return await self.work(self._finish, held, status, at, faults)

    def _finish(self, held: Batch, status: BatchStatus, at: int, faults: Sequence[Fault]) -> Batch:
        with closing(self._make()) as database:
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
                self._contents.put(path, _name(file))
                files.append(file)
                names[column] = file.id
            changes: dict[str, object] = {"status": status, f"{status}_at": at, **names}
            if faults:
                changes["faults"] = tuple(faults)
            try:
                return database.finish(held, files, **changes)
            except (LeaseLost, NotFound, sqlite3.Error):
                # After other errors the files may be there.
                self._contents.delete(map(_name, files))
                raise

    # On threads

    def _open(self) -> Database:
        with self._opening:
            if self._database is None:
                try:
                    self._contents.prepare()
                except (FileNotFoundError, FileExistsError, NotADirectoryError) as error:
                    # As in /proc, or below a file: no folder can be made there.
                    raise OSError(errno.EROFS, error.strerror) from error
                self._database = self._make()
            return self._database

    def _close(self) -> None:
        if self._database is not None:
            self._database.close()
            self._database = None

    def _write(self, pieces: Iterable[bytes]) -> tuple[Path, int]:
        """Write a new file that has no name among the contents; return its path and size."""
        path = self._contents.incoming / secrets.token_hex(16)
        size = 0
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                for piece in pieces:
                    size += file.write(piece)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path, size

    async def _on(self, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, work)
        except redis.RedisError as error:
            raise _no_answer(type(error).__name__) from error
        except (OSError, sqlite3.Error) as error:
            if (known := storage_error(error)) is None:
                raise
            raise known from error


def _append(path: Path, data: bytes | bytearray) -> None:
    """Append data to a file that only the owner of the file can read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "ab") as file:
        file.write(data)


def _name(file: StoredFile) -> str:
    return f"files/{file.id}"


def _no_answer(reason: str) -> Unavailable:
    # A message of the server may name users and keys: clients do not see it.
    return Unavailable(
        f"the state of files and batches cannot be reached ({reason})", retry_after=_RETRY_S
    )


def _expiry(created_at: int, expires_s: int | None) -> int:
    return created_at + (KEPT_S if expires_s is None else expires_s)


def _file_id() -> str:
    return f"file-{secrets.token_hex(12)}"
