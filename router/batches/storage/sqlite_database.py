"""The state of files and batches in SQLite, in a file that several processes of one host share.

SQLite is used because batches must outlive the cluster, whose embedded Redis keeps nothing. In WAL
mode, readers and one writer do not block each other. Each change is one transaction, on the disk
before it is answered. The results of running batches are in a table.

One object belongs to one thread.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from baton.errors import InvalidRequest, NotFound, Overloaded
from router.batches.schedule.plan import BatchWork
from router.batches.schedule.throughput import Progress
from router.batches.storage import database as bounds
from router.batches.storage import quota as quotas
from router.batches.storage.batch import (
    UNFINISHED,
    Batch,
    BatchStatus,
    Fault,
    LineResult,
    StoredFile,
)
from router.batches.storage.database import Free, LeaseLost, NoSpace, StatusChanged
from router.batches.storage.quota import Quota, no_room, too_many_files
from router.batches.storage.tables import MARKS, change, open_tables

_IS_NEEDED = (
    "EXISTS (SELECT 1 FROM batches WHERE input_file_id = files.id"  # noqa: S608 - our own names
    f" AND status IN ({MARKS}))"
)
_BATCH_COLUMNS = tuple(field.name for field in fields(Batch))
_FILE_COLUMNS = tuple(field.name for field in fields(StoredFile))
_SELECT_BATCH = f"SELECT {', '.join(_BATCH_COLUMNS)} FROM batches"  # noqa: S608 - our own names
_SELECT_FILE = f"SELECT {', '.join(_FILE_COLUMNS)} FROM files"  # noqa: S608 - our own names


class SqliteDatabase:
    """One connection to the tables of files and batches. See ``Database`` for its methods; they
    raise ``sqlite3.Error`` if the disk fails."""

    def __init__(self, path: Path) -> None:
        """Open the database file ``path``, or create it. Its folder must exist. Raises
        ConfigError."""
        self._connection = open_tables(path)

    def close(self) -> None:
        self._connection.close()

    def identity(self) -> str:
        return ""

    # Files

    def reserve(self, upload_id: str, tenant: str, size: int, ahead: int, quota: Quota) -> int:
        with change(self._connection) as connection:
            (files,) = connection.execute(
                "SELECT (SELECT count(*) FROM files WHERE tenant = :tenant)"
                " + (SELECT count(*) FROM uploads WHERE tenant = :tenant AND id != :upload_id)",
                {"tenant": tenant, "upload_id": upload_id},
            ).fetchone()
            if files >= quotas.MAX_FILES_OF_TENANT:
                raise too_many_files(files)
            room = self._room_of(tenant, quota, upload_id)
            if room < size:
                raise no_room(room)
            granted = size + min(ahead, (room - size) // 4)
            connection.execute(
                "INSERT OR REPLACE INTO uploads VALUES (?, ?, ?)", (upload_id, tenant, granted)
            )
            return granted

    def _room_of(self, tenant: str, quota: Quota, upload_id: str = "") -> int:
        """Return the bytes that a tenant may still store, without counting an upload."""
        held, total = self._connection.execute(
            "SELECT coalesce(sum(iif(tenant = :tenant, size, 0)), 0), coalesce(sum(size), 0) FROM"
            " (SELECT tenant, size FROM files"
            " UNION ALL SELECT tenant, size FROM uploads WHERE id != :upload_id"
            " UNION ALL SELECT tenant, result_bytes FROM batches WHERE result_bytes > 0)",
            {"tenant": tenant, "upload_id": upload_id},
        ).fetchone()
        return int(min(quota.of_tenant - held, quota.total - total))

    def release_uploads(self, ids: Sequence[str]) -> None:
        with change(self._connection) as connection:
            connection.executemany("DELETE FROM uploads WHERE id = ?", [(name,) for name in ids])

    def uploads(self) -> dict[str, int]:
        return dict(self._connection.execute("SELECT id, size FROM uploads").fetchall())

    def add_file(self, file: StoredFile, upload_id: str, quota: Quota) -> None:
        with change(self._connection) as connection:
            gone = connection.execute("DELETE FROM uploads WHERE id = ?", (upload_id,))
            if not gone.rowcount and (room := self._room_of(file.tenant, quota)) < file.size:
                raise no_room(room)
            self._insert_file(file)

    def _insert_file(self, file: StoredFile) -> None:
        self._insert("files", asdict(file))

    def file(self, file_id: str, tenant: str, now: int = 0) -> StoredFile:
        found = self._connection.execute(
            f"{_SELECT_FILE} WHERE id = ? AND tenant = ?", (file_id, tenant)
        ).fetchone()
        file = None if found is None else StoredFile(*found)
        if file is None or file.expires_at <= now:
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
        where: dict[str, str | int] = {"tenant = ?": tenant}
        if purpose:
            where["purpose = ?"] = purpose
        where["expires_at > ?"] = now
        rows = self._page(_SELECT_FILE, "files", where, after, limit, ascending=ascending)
        return [StoredFile(*row) for row in rows]

    def delete_file(self, file_id: str, tenant: str) -> None:
        self.file(file_id, tenant)
        with change(self._connection) as connection:
            users = connection.execute(
                f"SELECT id FROM batches WHERE input_file_id = ? AND status IN ({MARKS})",  # noqa: S608
                (file_id, *UNFINISHED),
            ).fetchone()
            if users is not None:
                raise InvalidRequest(
                    f"the batch {users[0]} still needs the file: cancel the batch first",
                    param="file_id",
                )
            connection.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def collect(self, now: int) -> list[str]:
        # Check before starting a write: usually there is none.
        if not self._expired(now):
            return []
        with change(self._connection) as connection:
            gone = self._expired(now)
            connection.executemany("DELETE FROM files WHERE id = ?", gone)
        return [name for (name,) in gone]

    def _expired(self, now: int) -> list[tuple[str]]:
        return self._connection.execute(
            f"SELECT id FROM files WHERE expires_at <= ? AND NOT {_IS_NEEDED}",  # noqa: S608
            (now, *UNFINISHED),
        ).fetchall()

    def content_ids(self) -> set[str]:
        return {name for (name,) in self._connection.execute("SELECT id FROM files")}

    # Batches

    def add_batch(self, batch: Batch) -> None:
        with change(self._connection) as connection:
            (unfinished,) = connection.execute(
                f"SELECT count(*) FROM batches WHERE tenant = ? AND status IN ({MARKS})",  # noqa: S608
                (batch.tenant, *UNFINISHED),
            ).fetchone()
            if unfinished >= bounds.MAX_UNFINISHED_OF_TENANT:
                raise Overloaded(
                    f"{unfinished} unfinished batches are the maximum: wait, or cancel some",
                    retry_after=bounds.BUSY_RETRY_S,
                )
            connection.execute(
                "DELETE FROM batches WHERE place IN (SELECT place FROM batches"  # noqa: S608
                f" WHERE tenant = ? AND status NOT IN ({MARKS})"
                " ORDER BY place DESC LIMIT -1 OFFSET ?)",
                (batch.tenant, *UNFINISHED, bounds.MAX_ENDED_OF_TENANT - 1),
            )
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
        found = self._connection.execute(f"{_SELECT_BATCH} WHERE id = ?", (batch_id,)).fetchone()
        batch = None if found is None else _batch(found)
        if batch is None or tenant not in (None, batch.tenant):
            raise NotFound("there is no such batch", param="batch_id")
        return batch

    def batches(self, tenant: str, after: str, limit: int) -> list[Batch]:
        where: dict[str, str | int] = {"tenant = ?": tenant}
        rows = self._page(_SELECT_BATCH, "batches", where, after, limit, ascending=False)
        return [_batch(row) for row in rows]

    def of_ids(self, batch_ids: Collection[str]) -> list[Batch]:
        select = f"{_SELECT_BATCH} WHERE id IN ({', '.join('?' * len(batch_ids))}) ORDER BY place"
        return [_batch(row) for row in self._connection.execute(select, (*batch_ids,)).fetchall()]

    def beats(self) -> dict[str, int]:
        return dict(
            self._connection.execute(
                "SELECT owner, sum(beat) FROM batches WHERE owner != '' GROUP BY owner"
            ).fetchall()
        )

    def to_be_ended(self, free: Free, now: int, limit: int) -> list[Batch]:
        where, values = _clause(free)
        rows = self._connection.execute(
            f"{_SELECT_BATCH} WHERE {where} AND (status IN (?, ?) OR expires_at <= ?)"
            " ORDER BY place LIMIT ?",
            (*values, BatchStatus.CANCELLING, BatchStatus.FINALIZING, now, limit),
        )
        return [_batch(row) for row in rows.fetchall()]

    def to_be_run(self, free: Free, model: str, *, of_tenant: int, limit: int) -> list[Batch]:
        where, values = _clause(free)
        columns = ", ".join(_BATCH_COLUMNS)
        rows = self._connection.execute(
            f"SELECT {columns} FROM (SELECT *, row_number() OVER"  # noqa: S608 - our own names
            f" (PARTITION BY tenant ORDER BY expires_at, place) AS turn FROM batches WHERE {where}"
            " AND model = ?) WHERE turn <= ? ORDER BY turn, expires_at, place LIMIT ?",
            (*values, model, of_tenant, limit),
        )
        return [_batch(row) for row in rows.fetchall()]

    # Planning

    def works(self, model: str) -> list[BatchWork]:
        rows = self._connection.execute(
            "SELECT id, tenant, expires_at, total, completed + failed,"
            " prompt_tokens + completion_tokens FROM batches WHERE status = ? AND model = ?"
            " ORDER BY expires_at LIMIT ?",
            (BatchStatus.IN_PROGRESS, model, bounds.MAX_PLANNED),
        )
        return [BatchWork(*row) for row in rows.fetchall()]

    def progress(self, model: str) -> Progress:
        row = self._connection.execute(
            "SELECT lines, tokens, tokens_per_s FROM progress WHERE model = ?", (model,)
        ).fetchone()
        return Progress() if row is None else Progress(*row)

    def learn_speed(self, model: str, tokens_per_s: float) -> None:
        with change(self._connection) as connection:
            connection.execute(
                "UPDATE progress SET tokens_per_s = ? WHERE model = ?", (tokens_per_s, model)
            )

    def cancel(self, batch_id: str, tenant: str, now: int) -> Batch:
        with change(self._connection):
            batch = self.batch(batch_id, tenant)
            if batch.status is BatchStatus.CANCELLING:
                return batch
            if batch.status not in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                raise InvalidRequest(f"a batch that is {batch.status} cannot be cancelled")
            self._update(batch, status=BatchStatus.CANCELLING, cancelling_at=now)
            return replace(batch, status=BatchStatus.CANCELLING, cancelling_at=now)

    # Methods for the owner of a batch

    def claim(self, batch: Batch, owner: str) -> Batch | None:
        with change(self._connection):
            now = self.batch(batch.id)
            if (now.owner, now.beat, now.epoch) != (batch.owner, batch.beat, batch.epoch):
                return None
            if not now.unfinished:
                return None
            self._update(now, owner=owner, epoch=now.epoch + 1)
            return replace(now, owner=owner, epoch=now.epoch + 1)

    def beat(self, owner: str) -> None:
        with change(self._connection) as connection:
            connection.execute("UPDATE batches SET beat = beat + 1 WHERE owner = ?", (owner,))

    def release(self, owner: str) -> None:
        with change(self._connection) as connection:
            connection.execute("UPDATE batches SET owner = '' WHERE owner = ?", (owner,))

    def move(self, held: Batch, /, **changes: Any) -> Batch:
        with change(self._connection):
            batch = self._held(held)
            if batch.status is not held.status:
                raise StatusChanged(held.id)
            self._update(batch, **changes)
            return replace(batch, **changes)

    def done_lines(self, batch_id: str) -> set[int]:
        rows = self._connection.execute("SELECT line FROM results WHERE batch_id = ?", (batch_id,))
        return {line for (line,) in rows}

    def add_results(self, held: Batch, results: Sequence[LineResult], quota: Quota) -> None:
        with change(self._connection) as connection:
            batch = self._held(held)
            fresh = [result for result in results if self._insert_result(held.id, result)]
            size = sum(result.size for result in fresh)
            if self._room_of(batch.tenant, quota) < size:
                raise NoSpace(held.id)
            ok = sum(result.ok for result in fresh)
            # Rejected and expired lines took no time.
            each = [result.prompt_tokens + result.completion_tokens for result in fresh]
            connection.execute(
                "INSERT INTO progress VALUES (?, ?, ?, NULL) ON CONFLICT (model) DO UPDATE"
                " SET lines = lines + excluded.lines, tokens = tokens + excluded.tokens",
                (batch.model, sum(tokens > 0 for tokens in each), sum(each)),
            )
            connection.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?,"
                " prompt_tokens = prompt_tokens + ?, cached_tokens = cached_tokens + ?,"
                " completion_tokens = completion_tokens + ?, result_bytes = result_bytes + ?"
                " WHERE id = ?",
                (
                    ok,
                    len(fresh) - ok,
                    sum(result.prompt_tokens for result in fresh),
                    sum(result.cached_tokens for result in fresh),
                    sum(result.completion_tokens for result in fresh),
                    size,
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
        with closing(self._connection.cursor()) as cursor:
            cursor.execute(
                "SELECT record FROM results WHERE batch_id = ? AND ok = ? ORDER BY line",
                (batch_id, int(ok)),
            )
            for (record,) in cursor:
                yield record

    def finish(self, held: Batch, files: Sequence[StoredFile], **changes: Any) -> Batch:
        with change(self._connection) as connection:
            batch = self._held(held)
            for file in files:
                self._insert_file(file)
            changes |= {"owner": "", "result_bytes": 0}
            self._update(batch, **changes)
            connection.execute("DELETE FROM results WHERE batch_id = ?", (batch.id,))
            return replace(batch, **changes)

    def _held(self, held: Batch) -> Batch:
        """Return the current state, in the table, of the batch ``held``. The caller must be in a
        transaction. Raises LeaseLost if another process owns the batch now."""
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
        """Return a page of rows of a table.

        ``where``: SQL conditions with one placeholder each, and the placeholders' values. The
        tenant's condition comes first.
        """
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


def _clause(free: Free) -> tuple[str, tuple[str, ...]]:
    """Return the condition that selects free batches in SQL, and the values of its
    placeholders."""
    owners = ", ".join("?" * len(free.owners))
    but = ", ".join("?" * len(free.but))
    condition = f"status IN ({MARKS}) AND owner IN ({owners}) AND id NOT IN ({but})"
    return condition, (*UNFINISHED, *free.owners, *free.but)
