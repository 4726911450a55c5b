"""The SQLite tables of files and batches: their columns, and how they are opened and changed."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from baton.errors import ConfigError
from router.batches.storage.batch import UNFINISHED

MARKS = ", ".join("?" * len(UNFINISHED))
"""SQL placeholders for the statuses of unfinished batches."""
VERSION = 4
"""Version of the database's schema."""
BUSY_S = 5.0
"""Maximum time that a change waits for a change by another process, in seconds."""
_TABLES = """
CREATE TABLE files (
    place INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE, tenant TEXT NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL,
    size INTEGER NOT NULL, created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL
);
CREATE INDEX files_by_tenant ON files (tenant, size);
CREATE TABLE uploads (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, size INTEGER NOT NULL
) WITHOUT ROWID;
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
    output_expires_s INTEGER, result_bytes INTEGER NOT NULL
);
CREATE INDEX batches_by_status ON batches (status);
CREATE INDEX batches_by_tenant ON batches (tenant, status);
CREATE INDEX results_by_tenant ON batches (tenant, result_bytes) WHERE result_bytes > 0;
CREATE INDEX batches_by_owner ON batches (owner, beat) WHERE owner != '';
CREATE TABLE progress (
    model TEXT PRIMARY KEY, lines INTEGER NOT NULL, tokens INTEGER NOT NULL, tokens_per_s REAL
) WITHOUT ROWID;
CREATE TABLE results (
    batch_id TEXT NOT NULL, line INTEGER NOT NULL, ok INTEGER NOT NULL, record TEXT NOT NULL,
    PRIMARY KEY (batch_id, line)
) WITHOUT ROWID;
"""


def open_tables(path: Path) -> sqlite3.Connection:
    """Open or create the tables at ``path``, whose folder must exist. Raises ConfigError."""
    # Only the owner of the file can read it: it contains answers.
    path.touch(mode=0o600)
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        with change(connection):
            _make_tables(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _make_tables(connection: sqlite3.Connection, path: Path) -> None:
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == VERSION:
        return
    if version:
        raise ConfigError(
            f"{path} has tables of version {version}, but this Baton supports {VERSION}: set"
            " another data_dir"
        )
    for statement in _TABLES.split(";"):
        connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {VERSION}")


@contextmanager
def change(connection: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    """Run the context's body as one transaction. It takes the write lock at its start, so that it
    never has to retry."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield connection
        connection.execute("COMMIT")
    except BaseException:
        # After some errors, such as a full disk, SQLite itself has ended the transaction.
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
