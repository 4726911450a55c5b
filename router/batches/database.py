"""The table of files and batches: SQLite in a file that several processes of one host share.

SQLite, because batches must outlive the cluster, whose embedded store forgets, and because all
router processes of a cluster run on one host. In WAL mode readers and one writer do not wait for
each other; each change is one transaction, on the disk before it is answered.

One object belongs to one thread.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from baton.errors import ConfigError, InvalidRequest, NotFound, RequestTooLarge
from router.batches.batch import UNFINISHED, Batch, BatchStatus, LineResult, StoredFile
from router.batches.line import Fault

VERSION = 2
"""Of the tables."""
BUSY_S = 5.0
"""How long a change waits for that of another process."""

_TABLES = """
CREATE TABLE files (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    size INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER
);
CREATE TABLE batches (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, key_id TEXT NOT NULL, model TEXT NOT NULL,
    endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, metadata TEXT NOT NULL,
    status TEXT NOT NULL, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER,
    failed_at INTEGER, expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER,
    total INTEGER NOT NULL, completed INTEGER NOT NULL, failed INTEGER NOT NULL,
    prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, output_file_id TEXT, error_file_id TEXT,
    faults TEXT NOT NULL, owner TEXT NOT NULL, beat INTEGER NOT NULL, epoch INTEGER NOT NULL,
    output_expires_s INTEGER
);
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE results (
    batch_id TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (batch_id, line)
) WITHOUT ROWID;
"""
_SINCE_1 = (
    "ALTER TABLE files ADD COLUMN expires_at INTEGER",
    "ALTER TABLE batches ADD COLUMN output_expires_s INTEGER",
)
"""What has come to the tables of version 1."""
_IS_NEEDED = (
    "EXISTS (SELECT 1 FROM batches WHERE input_file_id = files.id"  # noqa: S608 - our own names
    f" AND status IN ({', '.join('?' * len(UNFINISHED))}))"
)
_BATCH_COLUMNS = tuple(field.name for field in fields(Batch))
_FILE_COLUMNS = tuple(field.name for field in fields(StoredFile))
_SELECT_BATCH = f"SELECT {', '.join(_BATCH_COLUMNS)} FROM batches"  # noqa: S608 - our own names
_SELECT_FILE = f"SELECT {', '.join(_FILE_COLUMNS)} FROM files"  # noqa: S608 - our own names


class LeaseLost(Exception):
    """Another process runs the batch now."""


class StatusChanged(Exception):
    """Somebody has cancelled the batch meanwhile."""


class Database:
    """One connection. Raises ``sqlite3.Error`` where the disk fails."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` or make it; its folder must be there. Raises ConfigError."""
        # Its owner alone may read it: it holds answers.
        path.touch(mode=0o600)
        self._connection = sqlite3.connect(
            path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
        )
        try:
            self._connection.execute("PRAGMA journal_mode = WAL")
            self._connection.execute("PRAGMA synchronous = FULL")
            self._make_tables(path)
        except BaseException:
            self._connection.close()
            raise

    def close(self) -> None:
        self._connection.close()

    def _make_tables(self, path: Path) -> None:
        with self._change():
            (version,) = self._connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                for statement in _TABLES.split(";"):
                    self._connection.execute(statement)
            elif version == 1:
                for statement in _SINCE_1:
                    self._connection.execute(statement)
            elif version != VERSION:
                raise ConfigError(
                    f"{path} has tables of version {version}, and this Baton knows {VERSION}: name"
                    " another data_dir"
                )
            self._connection.execute(f"PRAGMA user_version = {VERSION}")

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """One transaction. It may write from its start, so that it never has to give way."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield self._connection
        except BaseException:
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    # Files

    def add_file(self, file: StoredFile, max_bytes: int) -> None:
        """Raises RequestTooLarge where all files together would be larger than ``max_bytes``."""
        with self._change() as connection:
            (held,) = connection.execute("SELECT coalesce(sum(size), 0) FROM files").fetchone()
            if held + file.size > max_bytes:
                raise RequestTooLarge(
                    f"there is no room: files take {held} of {max_bytes} bytes; delete some"
                )
            self._insert_file(file)

    def _insert_file(self, file: StoredFile) -> None:
        self._insert("files", asdict(file))

    def file(self, file_id: str, tenant: str, now: int = 0) -> StoredFile:
        """One that has expired by ``now`` is there no more. Raises NotFound."""
        found = self._connection.execute(
            f"{_SELECT_FILE} WHERE id = ? AND tenant = ?", (file_id, tenant)
        ).fetchone()
        file = None if found is None else StoredFile(*found)
        if file is None or (file.expires_at is not None and file.expires_at <= now):
            raise NotFound("there is no such file", param="file_id")
        return file

    def files(
        self,
        tenant: str,
        purpose: str,
        after: str,
        limit: int,
        *,
        ascending: bool,
        now: int = 0,
    ) -> list[StoredFile]:
        """A tenant's files, of one purpose or of any (""), from the one behind ``after`` on.

        Without those that have expired by ``now``.
        """
        where: dict[str, str | int] = {"tenant = ?": tenant}
        if purpose:
            where["purpose = ?"] = purpose
        where["(expires_at IS NULL OR expires_at > ?)"] = now
        rows = self._page(_SELECT_FILE, "files", where, after, limit, ascending=ascending)
        return [StoredFile(*row) for row in rows]

    def delete_file(self, file_id: str, tenant: str) -> None:
        """Raises NotFound, and InvalidRequest while a batch needs it."""
        self.file(file_id, tenant)
        with self._change() as connection:
            marks = ", ".join("?" * len(UNFINISHED))
            users = connection.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({marks})",  # noqa: S608
                (file_id, *UNFINISHED),
            ).fetchone()
            if users is not None:
                raise InvalidRequest(f"the batch {users[0]} needs the file", param="file_id")
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def collect(self, now: int) -> list[str]:
        """Forget the files that have expired by ``now`` and that no batch needs; their ids."""
        # Looked for before anything is written: mostly there is none.
        if not self._expired(now):
            return []
        with self._change() as connection:
            gone = self._expired(now)
            connection.executemany("DELETE FROM files WHERE id = ?", gone)
        return [name for (name,) in gone]

    def _expired(self, now: int) -> list[tuple[str]]:
        return self._connection.execute(
            f"SELECT id FROM files WHERE expires_at <= ? AND NOT {_IS_NEEDED}",  # noqa: S608
            (now, *UNFINISHED),
        ).fetchall()

    def file_ids(self) -> set[str]:
        """Of all tenants."""
        return {name for (name,) in self._connection.execute("SELECT id FROM files")}

    # Batches

    def add_batch(self, batch: Batch) -> None:
        """Raises NotFound where its file is not there, InvalidRequest where that is no input."""
        with self._change():
            file = self.file(batch.input_file_id, batch.tenant, batch.created_at)
            if file.purpose != "batch":
                raise InvalidRequest("the file's purpose must be 'batch'", param="input_file_id")
            row = {
                **asdict(batch),
                "metadata": json.dumps(batch.metadata),
                "faults": _faults_text(batch.faults),
            }
            self._insert("batches", row)

    def batch(self, batch_id: str, tenant: str | None = None) -> Batch:
        """A batch, of any tenant or of one. Raises NotFound."""
        found = self._connection.execute(f"{_SELECT_BATCH} WHERE id = ?", (batch_id,)).fetchone()
        batch = None if found is None else _batch(found)
        if batch is None or tenant not in (None, batch.tenant):
            raise NotFound("there is no such batch", param="batch_id")
        return batch

    def batches(self, tenant: str, after: str, limit: int) -> list[Batch]:
        """A tenant's batches, newest first, from the one behind ``after`` on."""
        where: dict[str, str | int] = {"tenant = ?": tenant}
        rows = self._page(_SELECT_BATCH, "batches", where, after, limit, ascending=False)
        return [_batch(row) for row in rows]

    def unfinished(self) -> list[Batch]:
        """Of all tenants, oldest first."""
        marks = ", ".join("?" * len(UNFINISHED))
        rows = self._connection.execute(
            f"{_SELECT_BATCH} WHERE status IN ({marks}) ORDER BY place", UNFINISHED
        )
        return [_batch(row) for row in rows.fetchall()]

    def cancel(self, batch_id: str, tenant: str, now: int) -> Batch:
        """Ask for its end. Raises NotFound, and InvalidRequest where it has ended already."""
        with self._change():
            batch = self.batch(batch_id, tenant)
            if batch.status is BatchStatus.CANCELLING:
                return batch
            if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                raise InvalidRequest(f"a batch that is {batch.status} cannot be cancelled")
            self._update(batch, status=BatchStatus.CANCELLING, cancelling_at=now)
            return replace(batch, status=BatchStatus.CANCELLING, cancelling_at=now)

    # What the owner of a batch does

    def claim(self, batch: Batch, owner: str) -> Batch | None:
        """Become the owner of a batch that has not changed hands since it was read."""
        with self._change():
            now = self.batch(batch.id)
            if (now.owner, now.beat, now.epoch) != (batch.owner, batch.beat, batch.epoch):
                return None
            if not now.unfinished:
                return None
            self._update(now, owner=owner, epoch=now.epoch + 1)
            return replace(now, owner=owner, epoch=now.epoch + 1)

    def beat(self, owner: str) -> None:
        """Renew the lease of all that ``owner`` has."""
        with self._change() as connection:
            connection.execute("UPDATE batches SET beat = beat + 1 WHERE owner = ?", (owner,))

    def release(self, owner: str) -> None:
        """Give up all that ``owner`` has: others need not wait for the end of its lease."""
        with self._change() as connection:
            connection.execute("UPDATE batches SET owner = '' WHERE owner = ?", (owner,))

    def move(self, held: Batch, /, **changes: Any) -> Batch:
        """Change a batch whose status is that of ``held``. Raises LeaseLost, StatusChanged."""
        with self._change():
            batch = self._held(held)
            if batch.status is not held.status:
                raise StatusChanged(held.id)
            self._update(batch, **changes)
            return replace(batch, **changes)

    def done_lines(self, batch_id: str) -> set[int]:
        """The numbers of the lines that have a result."""
        rows = self._connection.execute("SELECT line FROM results WHERE batch_id = ?", (batch_id,))
        return {line for (line,) in rows}

    def add_results(self, held: Batch, results: Sequence[LineResult]) -> None:
        """Keep results; a line that has one keeps that. Raises LeaseLost."""
        with self._change() as connection:
            batch = self._held(held)
            fresh = [result for result in results if self._insert_result(held.id, result)]
            ok = sum(result.ok for result in fresh)
            connection.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?,"
                " prompt_tokens = prompt_tokens + ?, cached_tokens = cached_tokens + ?,"
                " completion_tokens = completion_tokens + ? WHERE id = ?",
                (
                    ok,
                    len(fresh) - ok,
                    sum(result.prompt_tokens for result in fresh),
                    sum(result.cached_tokens for result in fresh),
                    sum(result.completion_tokens for result in fresh),
                    batch.id,
                ),
            )

    def _insert_result(self, batch_id: str, result: LineResult) -> bool:
        cursor = self._connection.execute(
            "INSERT OR IGNORE INTO results VALUES (?, ?, ?, ?)",
            (batch_id, result.number, int(result.ok), result.record),
        )
        return cursor.rowcount == 1

    def records(self, batch_id: str, *, ok: bool) -> Iterator[str]:
        """The results of one kind, in the order of their lines."""
        with closing(self._connection.cursor()) as cursor:
            cursor.execute(
                "SELECT record FROM results WHERE batch_id = ? AND ok = ? ORDER BY line",
                (batch_id, int(ok)),
            )
            for (record,) in cursor:
                yield record

    def finish(self, held: Batch, files: Sequence[StoredFile], **changes: Any) -> Batch:
        """The end: the results have become ``files``. Raises LeaseLost."""
        with self._change() as connection:
            batch = self._held(held)
            for file in files:
                self._insert_file(file)
            self._update(batch, owner="", **changes)
            connection.execute("DELETE FROM results WHERE batch_id = ?", (batch.id,))
            return replace(batch, owner="", **changes)

    def _held(self, held: Batch) -> Batch:
        """The batch as it is now, within a change."""
        batch = self.batch(held.id)
        if (batch.owner, batch.epoch) != (held.owner, held.epoch):
            raise LeaseLost(held.id)
        return batch

    # Statements

    def _update(self, batch: Batch, **changes: Any) -> None:
        if "faults" in changes:
            changes["faults"] = _faults_text(changes["faults"])
        names = ", ".join(f"{name} = ?" for name in changes)
        self._connection.execute(
            f"UPDATE batches SET {names} WHERE id = ?",  # noqa: S608 - our own names
            (*changes.values(), batch.id),
        )

    def _insert(self, table: str, row: dict[str, Any]) -> None:
        names, marks = ", ".join(row), ", ".join("?" * len(row))
        self._connection.execute(
            f"INSERT INTO {table} ({names}) VALUES ({marks})",  # noqa: S608 - our own names
            tuple(row.values()),
        )

    def _page(
        self,
        select: str,
        table: str,
        where: Mapping[str, str | int],
        after: str,
        limit: int,
        *,
        ascending: bool,
    ) -> list[tuple[Any, ...]]:
        """``where``: clauses with a mark each, and what stands for it; the tenant's first."""
        clauses, values = list(where), list(where.values())
        if after:
            sign = ">" if ascending else "<"
            clauses.append(f"place {sign} (SELECT place FROM {table} WHERE id = ? AND tenant = ?)")  # noqa: S608
            values += [after, values[0]]
        order = "ASC" if ascending else "DESC"
        return self._connection.execute(
            f"{select} WHERE {' AND '.join(clauses)} ORDER BY place {order} LIMIT ?",
            (*values, limit),
        ).fetchall()


def _batch(row: Sequence[Any]) -> Batch:
    values = dict(zip(_BATCH_COLUMNS, row, strict=True))
    values["status"] = BatchStatus(values["status"])
    values["metadata"] = json.loads(values["metadata"])
    values["faults"] = tuple(Fault(**fault) for fault in json.loads(values["faults"]))
    return Batch(**values)


def _faults_text(faults: Sequence[Fault]) -> str:
    return json.dumps([asdict(fault) for fault in faults])
