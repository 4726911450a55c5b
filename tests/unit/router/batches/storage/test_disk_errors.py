"""Files and batches on disks that have no room, with errors of the kernel and of SQLite."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from baton.errors import StorageFull
from router.batches.storage.batch import Batch
from router.batches.storage.database import Database
from router.batches.storage.disk_errors import storage_error
from router.batches.storage.store import BatchStore
from router.batches.storage.tables import change, open_tables
from tests.support.router.batches_runner import QUOTA, stored_file


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[BatchStore]:
    made = BatchStore.local(tmp_path / "data", QUOTA)
    yield made
    await made.close()


@contextmanager
def no_longer_files() -> Iterator[None]:
    """No file of this process gets any longer: as on a full disk, but with EFBIG."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def error_of(path: Path, statement: str) -> sqlite3.Error:
    uri = f"file:{path}?mode=ro"
    with pytest.raises(sqlite3.Error) as caught, closing(sqlite3.connect(uri, uri=True)) as reader:
        reader.execute(statement)
    return caught.value


def test_the_kernels_errors() -> None:
    with (
        pytest.raises(OSError, match="No space left") as caught,
        open("/dev/full", "wb", 0) as file,
    ):
        file.write(b"x")
    found = storage_error(caught.value)
    assert found is not None
    assert (found.http_status, found.code) == (507, "storage_full")
    assert "No space left on device" in found.message
    assert storage_error(FileNotFoundError(2, "No such file or directory")) is None


def test_sqlites_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.sqlite"
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE a (b UNIQUE)")
    read_only = storage_error(error_of(path, "INSERT INTO a VALUES (1)"))
    assert read_only is not None
    assert "readonly" in read_only.message
    assert storage_error(error_of(tmp_path / "away.sqlite", "SELECT 1 FROM a")) is not None
    assert storage_error(error_of(path, "SELECT c FROM a")) is None
    assert storage_error(sqlite3.ProgrammingError("closed")) is None


@pytest.mark.parametrize("limit", ["of the file", "of the database"])
def test_a_transaction_that_finds_no_space_ends(tmp_path: Path, limit: str) -> None:
    """Otherwise no later one could begin."""
    connection = open_tables(tmp_path / "a.sqlite")
    insert = "INSERT INTO progress VALUES (?, 1, 1, NULL)"
    with closing(connection):
        (pages,) = connection.execute("PRAGMA page_count").fetchone()
        if limit == "of the file":
            with pytest.raises(sqlite3.Error) as caught, no_longer_files(), change(connection):
                connection.execute(insert, ("a",))
        else:
            connection.execute(f"PRAGMA max_page_count = {pages}")
            with pytest.raises(sqlite3.Error) as caught, change(connection):
                connection.execute(insert, ("a" * 100_000,))
            connection.execute(f"PRAGMA max_page_count = {pages + 1000}")
        assert storage_error(caught.value) is not None
        with change(connection):
            connection.execute(insert, ("b",))
        assert connection.execute("SELECT model FROM progress").fetchall() == [("b",)]


async def test_a_store_without_space_serves_again_later(store: BatchStore) -> None:
    file = await stored_file(store, b"x")
    batch = Batch("batch_1", "acme", "", "tiny", "/v1/completions", file.id, "1h", 1, 2, {})
    with no_longer_files():
        with pytest.raises(StorageFull):
            await stored_file(store, b"y")
        with pytest.raises(StorageFull):
            await store.ask(Database.add_batch, batch)
        assert await store.ask(Database.file, file.id, "acme") == file
    await store.ask(Database.add_batch, batch)
    later = await stored_file(store, b"z")
    path = store.path(later)
    assert path is not None
    assert await asyncio.to_thread(path.read_bytes) == b"z"


@pytest.mark.parametrize("folder", ["/proc/baton", "/dev/null/baton"])
async def test_a_folder_that_cannot_be_made(folder: str) -> None:
    store = BatchStore.local(Path(folder), QUOTA)
    with pytest.raises(StorageFull):
        await stored_file(store, b"x")
    await store.close()
