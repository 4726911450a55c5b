"""Contents in a bucket: a real server with the S3 protocol has it."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from baton.errors import ConfigError, Unavailable
from router.batches.storage import s3_contents
from router.batches.storage.batch import BatchStatus
from router.batches.storage.contents import Contents, FolderContents
from router.batches.storage.database import Database
from router.batches.storage.s3_contents import S3Contents
from router.batches.storage.store import BatchStore
from tests.support.router.batches_runner import Process, running, stored_file
from tests.support.router.bucket import bucket_server


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with bucket_server(monkeypatch) as url:
        yield url


@pytest.fixture(params=["folder", "bucket", "prefix"])
def contents(request: pytest.FixtureRequest, tmp_path: Path) -> Contents:
    made: Contents = FolderContents(tmp_path)
    if request.param != "folder":
        url = request.getfixturevalue("bucket")
        made = S3Contents(f"{url}/a/b/" if request.param == "prefix" else url, tmp_path)
    made.prepare()
    return made


def put(contents: Contents, name: str, content: bytes) -> None:
    path = contents.incoming / "new"
    path.write_bytes(content)
    contents.put(path, name)
    assert not path.exists()


def read(contents: Contents, name: str) -> bytes:
    with closing(contents.open(name)) as reader:
        return b"".join(iter(lambda: reader.read(1000), b""))


def test_what_is_put_is_read_listed_and_deleted(contents: Contents) -> None:
    put(contents, "files/file-1", b"x" * 2500)
    put(contents, "parts/batch_1/p", b"")
    put(contents, "identity", b"me")
    assert read(contents, "files/file-1") == b"x" * 2500
    assert read(contents, "parts/batch_1/p") == b""
    assert read(contents, "identity") == b"me"
    signs = contents.signs()
    assert set(signs) == {"files/file-1", "parts/batch_1/p"}
    put(contents, "files/file-1", b"y")
    assert contents.signs()["files/file-1"] != signs["files/file-1"]
    contents.delete(["files/file-1", "parts/batch_1/p", "files/none"])
    assert contents.signs() == {}
    for name in ("files/file-1", "files/none"):
        with pytest.raises(FileNotFoundError):
            contents.open(name)


@pytest.mark.long
def test_more_than_a_page_of_objects(bucket: str, tmp_path: Path) -> None:
    contents = S3Contents(bucket, tmp_path)
    contents.prepare()
    for number in range(1001):
        put(contents, f"parts/b/{number}", b"x")
    assert len(contents.signs()) == 1001
    contents.delete(contents.signs())
    assert contents.signs() == {}


def test_a_bucket_that_does_not_exist_is_an_error(
    bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    contents = S3Contents("s3://no-such-bucket", tmp_path)
    contents.prepare()
    with pytest.raises(Unavailable, match="NoSuchBucket"):
        contents.open("files/x")
    with pytest.raises(Unavailable):
        put(contents, "files/x", b"x")
    assert caplog.text.count("NoSuchBucket") >= 2


def test_a_server_that_does_not_answer_has_a_deadline(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3_contents, "ANSWER_S", 0.1)
    monkeypatch.setattr(s3_contents, "_TRIES", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        contents = S3Contents(bucket, tmp_path)
        with pytest.raises(Unavailable, match="ReadTimeoutError"):
            contents.open("files/x")


def test_the_extra_is_named_where_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(ConfigError, match=r"s3://b.*baton-llm\[s3\]"):
        S3Contents("s3://b", tmp_path)


def test_a_region_is_needed(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "no url")
    with pytest.raises(ConfigError, match="batch_store"):
        S3Contents(bucket, tmp_path)


async def test_a_batch_runs_with_its_files_in_a_bucket(
    bucket: str, redis_url: str, tmp_path: Path
) -> None:
    process = Process(tmp_path)
    contents = S3Contents(f"{bucket}/cluster", tmp_path)
    process.use(BatchStore.shared(redis_url, str(tmp_path), contents, process.quota))
    async with running(process):
        batch = await process.until(await process.begin(300), BatchStatus.COMPLETED)
        assert await process.names(batch.output_file_id) == [f"line-{n}" for n in range(300)]
        assert sum(process.lines.ran.values()) == 300
        file = await stored_file(process.store, b"y" * 600_000, "other")
        pieces = [piece async for piece in await process.store.pieces(file)]
        assert b"".join(pieces) == b"y" * 600_000
        assert len(pieces) > 1
        await process.store.delete_file(file.id, "other")
        with pytest.raises(FileNotFoundError):
            await process.store.pieces(file)
        kept = await process.store.ask(Database.content_ids)
    names = {name for name in contents.signs() if name.startswith("files/")}
    assert names == {f"files/{name}" for name in kept}
    # Nothing is left on this machine.
    assert not any(contents.incoming.iterdir())
