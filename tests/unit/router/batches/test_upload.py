"""Files that arrive: on the disk of the data, within the quota, a few at a time."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from baton.errors import Overloaded, RequestTooLarge
from router.batches.runner import SWEEP_S
from router.batches.storage import store as store_module
from router.batches.storage.database import Database
from router.batches.storage.quota import Quota
from router.batches.storage.store import BatchStore
from tests.support.router import batches_runner
from tests.support.router.batches_api import chat, lines, served
from tests.support.router.batches_runner import path_of
from tests.support.router.front_fakes import plain_client

FORM = {"content-type": "multipart/form-data; boundary=b"}
HEAD = b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
PURPOSE = b'--b\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'


@pytest.fixture
async def store(storage: str, tmp_path: Path) -> AsyncIterator[BatchStore]:
    opened = batches_runner.make_store(tmp_path / "data", Quota(1000, 10_000))
    yield opened
    await opened.close()


async def test_what_arrives_is_on_the_disk_of_the_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another disk may be small, or the memory."""

    def no_temporary_file(*_: object, **__: object) -> None:
        raise AssertionError("a temporary file")

    for name in ("SpooledTemporaryFile", "TemporaryFile", "mkstemp", "gettempdir"):
        monkeypatch.setattr(tempfile, name, no_temporary_file)
    content = lines([chat("x" * 10_000, n=number) for number in range(1, 101)])
    seen: list[int] = []

    async def body() -> AsyncIterator[bytes]:
        yield HEAD
        for start in range(0, len(content), 1 << 16):
            yield content[start : start + (1 << 16)]
            await asyncio.sleep(0.01)
            seen.append(sum(path.stat().st_size for path in (tmp_path / "incoming").iterdir()))
        yield b"\r\n" + PURPOSE + b"--b--\r\n"

    async with served(tmp_path, max_body_bytes=20_000) as there, plain_client() as plain:
        url = f"http://{there.address}/v1/files"
        answer = await plain.post(url, content=body(), headers=FORM)
        assert answer.status_code == 200, answer.text
        assert answer.json()["bytes"] == len(content)
        got = await plain.get(f"{url}/{answer.json()['id']}/content")
        assert got.content == content
    assert max(seen) > len(content) // 2
    assert not list((tmp_path / "incoming").iterdir())


async def test_the_quota_counts_while_files_arrive(store: BatchStore) -> None:
    async with store.incoming("acme") as first, store.incoming("acme") as second:
        await first.write(b"x" * 600)
        await first.flush()
        await second.write(b"y" * 500)
        with pytest.raises(RequestTooLarge, match="300 bytes more"):
            await second.flush()
        async with store.incoming("other") as third:
            await third.write(b"z" * 1000)
            await third.keep("z", "batch")
    async with store.incoming("acme") as again:
        await again.write(b"x" * 1000)
        file = await again.keep("x", "batch")
    assert path_of(store, file).read_bytes() == b"x" * 1000
    assert await store.ask(Database.uploads) == {}
    await store.delete_file(file.id, "acme")
    async with store.incoming("acme") as last:
        await last.write(b"x" * 1000)
        await last.flush()


async def test_two_processes_share_the_quota(store: BatchStore, tmp_path: Path) -> None:
    other = batches_runner.make_store(tmp_path / "data", Quota(1000, 10_000))
    async with store.incoming("acme") as first:
        await first.write(b"x" * 600)
        await first.flush()
        async with other.incoming("acme") as second:
            await second.write(b"y" * 500)
            with pytest.raises(RequestTooLarge):
                await second.flush()
    await other.close()


async def test_a_few_files_arrive_at_a_time(
    store: BatchStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_UPLOADS", 3)
    monkeypatch.setattr(store_module, "MAX_UPLOADS_OF_TENANT", 2)
    async with store.incoming("acme"), store.incoming("acme"):
        with pytest.raises(Overloaded) as refused:
            async with store.incoming("acme"):
                pass
        assert refused.value.retry_after
        async with store.incoming("other"):
            with pytest.raises(Overloaded):
                async with store.incoming("third"):
                    pass
    async with store.incoming("acme"), store.incoming("third"):
        pass


async def test_a_dead_process_gives_its_room_back(store: BatchStore) -> None:
    await store.ask(Database.reserve, "dead", "acme", 900, 0, store.quota)
    async with store.incoming("acme") as living:
        for number in range(8):
            await living.write(b"x" * 12)
            await living.flush()
            assert "dead" in await store.ask(Database.uploads)
            await store.sweep(number * SWEEP_S)
        assert set(await store.ask(Database.uploads)) == {living.path.name}
        await living.write(b"x" * 900)
        assert (await living.keep("x", "batch")).size == 996


async def test_an_upload_whose_room_was_given_to_others_is_refused(store: BatchStore) -> None:
    """It was silent for so long that it counted as dead."""
    async with store.incoming("acme") as late:
        await late.write(b"x" * 600)
        await late.flush()
        await store.ask(Database.release_uploads, [late.path.name])
        async with store.incoming("acme") as other:
            await other.write(b"y" * 500)
            await other.keep("y", "batch")
        with pytest.raises(RequestTooLarge, match="500 bytes more"):
            await late.keep("x", "batch")
    (kept,) = await store.ask(Database.files, "acme", "", "", 10, ascending=True)
    assert kept.size == 500
    assert await store.ask(Database.content_ids) == {kept.id}


@pytest.mark.parametrize(
    "body",
    [
        HEAD + b"x\r\n" + PURPOSE,
        HEAD + b"x\r\n" + HEAD + b"y\r\n" + PURPOSE + b"--b--\r\n",
        HEAD.replace(b'"file"', b'"other"') + b"x\r\n" + PURPOSE + b"--b--\r\n",
        PURPOSE + b"--b--\r\n",
        HEAD + b"x\r\n--b--\r\n",
        b"--b\r\n" + b"x-long: " + b"h" * 200_000,
        PURPOSE * 3000,
        b"".join(PURPOSE.replace(b"purpose", b"p%d" % n) for n in range(17)) + b"--b--\r\n",
    ],
    ids=["cut", "two", "name", "none", "purpose", "head", "parts", "fields"],
)
async def test_forms_that_are_refused(tmp_path: Path, body: bytes) -> None:
    async with served(tmp_path) as there, plain_client() as plain:
        url = f"http://{there.address}/v1/files"
        answer = await plain.post(url, content=body, headers=FORM)
        assert answer.status_code == 400, answer.text
        assert (await plain.get(url)).json()["data"] == []
    assert not list((tmp_path / "incoming").iterdir())
