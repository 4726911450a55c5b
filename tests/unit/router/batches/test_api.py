"""Files and batches over HTTP, with OpenAI's own client, on a scripted cluster."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai.types import Batch, FileObject

from baton.config.access import KeyConfig, TenantConfig
from baton.errors import Overloaded, WorkerFailed
from baton.request import FinishReason
from baton.security.cluster_secret import cache_salt
from router.batches.storage.sqlite_database import SqliteDatabase
from router.core.request import GenerationRequest, OutputDelta
from tests.support.router.batches_api import CHAT, DEADLINE_S, Served, chat, lines, served
from tests.support.router.bucket import bucket_server
from tests.support.router.front_fakes import (
    check_schema,
    make_front,
    plain_client,
)

EXPIRES = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
KEYS = (
    KeyConfig(name="ann", sha256=hashlib.sha256(b"ann-key").hexdigest(), tenant="acme", priority=3),
    KeyConfig(name="bob", tenant="default", sha256=hashlib.sha256(b"bob-key").hexdigest()),
)


async def ended(client: openai.AsyncOpenAI, batch: Batch) -> Batch:
    async with asyncio.timeout(DEADLINE_S):
        while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
            await asyncio.sleep(0.01)
            batch = await client.batches.retrieve(batch.id)
    return batch


async def records(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return [json.loads(row) for row in content.text.splitlines()]


async def test_a_batch_with_openais_client(tmp_path: Path) -> None:
    async with served(tmp_path) as there, there.client() as client:
        bodies = [chat(), chat(temperature=9.0), chat("again")]
        file = await client.files.create(file=("in.jsonl", lines(bodies)), purpose="batch")
        assert (file.purpose, file.filename, file.bytes) == (
            "batch",
            "in.jsonl",
            len(lines(bodies)),
        )
        assert (await client.files.retrieve(file.id)) == file
        assert (await client.files.content(file.id)).content == lines(bodies)
        batch = await client.batches.create(
            input_file_id=file.id,
            endpoint=CHAT,
            completion_window="24h",
            metadata={"job": "seven"},
        )
        assert (batch.status, batch.object, batch.metadata) == (
            "validating",
            "batch",
            {"job": "seven"},
        )
        batch = await ended(client, batch)
        assert batch.status == "completed", batch
        assert batch.request_counts is not None
        counts = batch.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        good = await records(client, batch.output_file_id)
        assert [record["custom_id"] for record in good] == ["c-0", "c-2"]
        for record in good:
            assert record["error"] is None
            assert record["response"]["status_code"] == 200
            check_schema(record["response"]["body"], "CreateChatCompletionResponse")
        (bad,) = await records(client, batch.error_file_id)
        assert (bad["custom_id"], bad["response"]["status_code"]) == ("c-1", 400)
        check_schema(bad["response"]["body"], "ErrorResponse")
        assert bad["response"]["body"]["error"]["param"] == "temperature"
        usage = [record["response"]["body"]["usage"] for record in good]
        assert batch.usage is not None
        assert batch.usage.input_tokens == sum(one["prompt_tokens"] for one in usage)
        assert batch.usage.output_tokens == sum(one["completion_tokens"] for one in usage)
        listed = await client.files.list()
        assert {one.purpose for one in listed.data} == {"batch", "batch_output"}
        assert [one.id for one in (await client.batches.list()).data] == [batch.id]


async def test_responses_are_an_endpoint_of_batches(tmp_path: Path) -> None:
    url: Literal["/v1/responses"] = "/v1/responses"
    bodies: list[dict[str, Any]] = [
        {"model": "tiny", "input": "hello", "max_output_tokens": 3},
        {"model": "tiny"},
    ]
    async with served(tmp_path) as there, there.client() as client:
        file = await client.files.create(file=("in.jsonl", lines(bodies, url)), purpose="batch")
        begun = await client.batches.create(
            input_file_id=file.id, endpoint=url, completion_window="24h"
        )
        batch = await ended(client, begun)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        (record,) = await records(client, batch.output_file_id)
        body = record["response"]["body"]
        assert (record["custom_id"], body["object"]) == ("c-0", "response")
        assert body["usage"]["output_tokens"] == 3
        assert batch.usage is not None
        assert batch.usage.input_tokens == body["usage"]["input_tokens"]
        assert batch.usage.output_tokens == 3
        (refused,) = await records(client, batch.error_file_id)
        assert refused["response"]["body"]["error"]["param"] == "input"
        assert there.front.dispatcher.requests[0].background


async def test_embeddings_are_an_endpoint_of_batches(tmp_path: Path) -> None:
    async def embedding(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("", (), FinishReason.LENGTH, embedding=(1.0, 0.0))

    url: Literal["/v1/embeddings"] = "/v1/embeddings"
    bodies: list[dict[str, Any]] = [
        {"model": "tiny", "input": [[5, 6], [7]]},
        {"model": "tiny", "input": []},
    ]
    async with served(tmp_path) as there, there.client() as client:
        there.front.dispatcher.script = embedding
        file = await client.files.create(file=("in.jsonl", lines(bodies, url)), purpose="batch")
        begun = await client.batches.create(
            input_file_id=file.id, endpoint=url, completion_window="24h"
        )
        batch = await ended(client, begun)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
        (record,) = await records(client, batch.output_file_id)
        vectors = [one["embedding"] for one in record["response"]["body"]["data"]]
        assert vectors == [[1.0, 0.0], [1.0, 0.0]]
        assert batch.usage is not None
        assert (batch.usage.input_tokens, batch.usage.output_tokens) == (3, 0)
        assert all(request.background for request in there.front.dispatcher.requests)


async def test_lines_run_in_the_background_under_a_class_of_their_own(tmp_path: Path) -> None:
    async with served(tmp_path, keys=KEYS, tenants=(TenantConfig(name="acme"),)) as there:
        async with there.client("ann-key") as client:
            content = lines([{"model": "tiny", "prompt": "a b"}], "/v1/completions")
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            batch = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
            )
            batch = await ended(client, batch)
        (record,) = await _content(there, "ann-key", batch.output_file_id)
        check_schema(record["response"]["body"], "CreateCompletionResponse")
        (request,) = there.front.dispatcher.requests
        assert request.background
        assert request.deadline_s == there.front.config.request_deadline_s
        assert (request.principal.tenant, request.principal.key_id) == ("acme", "ann")
        assert (request.priority, request.cache_salt) == (3, cache_salt("", "acme"))
        assert there.front.requests() == {("batch", "ok", ""): 1.0}


async def _content(there: Served, key: str, file_id: str | None) -> list[dict[str, Any]]:
    async with there.client(key) as client:
        return await records(client, file_id)


async def test_a_key_sees_its_tenants_files_and_batches_alone(tmp_path: Path) -> None:
    tenants = (TenantConfig(name="acme"),)
    async with (
        served(tmp_path, keys=KEYS, tenants=tenants) as there,
        there.client("ann-key") as ann,
        there.client("bob-key") as bob,
    ):
        file = await ann.files.create(file=("in.jsonl", lines([chat()])), purpose="batch")
        batch = await ann.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        for question in (
            lambda: bob.files.retrieve(file.id),
            lambda: bob.files.content(file.id),
            lambda: bob.files.delete(file.id),
            lambda: bob.batches.retrieve(batch.id),
            lambda: bob.batches.cancel(batch.id),
            lambda: bob.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                await question()
        assert (await bob.files.list()).data == []
        assert (await bob.batches.list()).data == []
        await ended(ann, batch)


async def test_rejected_lines_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.line_runner.RETRY_S", 0.01)
    failures = iter([Overloaded("full"), WorkerFailed("gone")])
    front = make_front(data_dir=str(tmp_path))
    speak = front.dispatcher.speak

    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        error = next(failures, None)
        if error is not None:
            raise error
        async for delta in speak(request):
            yield delta

    front.dispatcher.script = script
    async with served(tmp_path, front) as there, there.client() as client:
        file = await client.files.create(file=("in.jsonl", lines([chat()])), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        batch = await ended(client, batch)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, len(front.dispatcher.requests)) == (1, 3)


async def test_a_worker_that_always_fails_fails_the_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.line_runner.RETRY_S", 0.001)

    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        raise WorkerFailed("gone")
        yield

    front = make_front(script, data_dir=str(tmp_path))
    async with served(tmp_path, front) as there, there.client() as client:
        file = await client.files.create(file=("in.jsonl", lines([chat()])), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        batch = await ended(client, batch)
        (record,) = await records(client, batch.error_file_id)
        assert record["response"]["body"]["error"]["code"] == "worker_failed"


async def test_canceling_aborts_what_runs(tmp_path: Path) -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        await asyncio.Event().wait()
        yield OutputDelta("", (), None)

    front = make_front(script, data_dir=str(tmp_path))
    async with served(tmp_path, front) as there, there.client() as client:
        file = await client.files.create(file=("in.jsonl", lines([chat()])), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        async with asyncio.timeout(DEADLINE_S):
            while not front.dispatcher.requests:
                await asyncio.sleep(0.01)
        batch = await client.batches.cancel(batch.id)
        assert batch.status == "cancelling"
        assert (await ended(client, batch)).status == "cancelled"
        assert front.dispatcher.closed.is_set()
        with pytest.raises(openai.BadRequestError):
            await client.batches.cancel(batch.id)


async def test_a_batch_says_what_its_window_is_too_short_for(tmp_path: Path) -> None:
    gate = asyncio.Event()
    asked = 0

    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        nonlocal asked
        asked += 1
        if asked > 10:
            await gate.wait()
        yield OutputDelta("x", (1,), FinishReason.STOP)

    front = make_front(script, data_dir=str(tmp_path))
    async with served(tmp_path, front) as there, there.client() as client:
        content = lines([chat()] * 30)
        file = await client.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        assert batch.model_extra is not None
        assert batch.model_extra["schedule"] is None
        async with asyncio.timeout(DEADLINE_S):
            while batch.request_counts is None or batch.request_counts.completed < 10:
                batch = await client.batches.retrieve(batch.id)
        schedule = (await client.batches.retrieve(batch.id)).model_extra["schedule"]  # type: ignore[index] # never None
        assert schedule == {
            "state": "full_speed",
            "starts_at": None,
            "estimated_end_at": None,
            "late_lines": 0,
            "message": None,
        }
        database = SqliteDatabase(tmp_path / "batches.sqlite")
        database.learn_speed("tiny", 1e-6)
        database.close()
        (listed,) = (await client.batches.list()).data
        for shown in (listed, await client.batches.retrieve(batch.id)):
            assert shown.model_extra is not None
            schedule = shown.model_extra["schedule"]
            assert schedule["late_lines"] == 20
            assert schedule["estimated_end_at"] == batch.expires_at
            assert "about 20 lines will have no answer" in schedule["message"]
        async with asyncio.timeout(DEADLINE_S):
            # The runner plans by the same table, now and then.
            while front.metrics.registry.get_sample_value("baton_batch_late_lines") != 20:
                await asyncio.sleep(0.01)
        gate.set()
        batch = await ended(client, batch)
        assert batch.model_extra is not None
        assert (batch.status, batch.model_extra["schedule"]) == ("completed", None)


BAD_FILES = (
    (b"{\n", "line 1"),
    (lines([chat()]) * 2, "line 2"),
    (b"", "no lines"),
    (lines([chat(stream=True)]), "stream"),
    (lines([chat()], "/v1/models"), "url"),
)


async def test_bad_files_are_refused(tmp_path: Path) -> None:
    async with served(tmp_path) as there, there.client() as client:
        for content, words in BAD_FILES:
            with pytest.raises(openai.BadRequestError, match=words):
                await client.files.create(file=("in.jsonl", content), purpose="batch")
        assert (await client.files.list()).data == []


async def test_uploads_are_bounded(tmp_path: Path) -> None:
    async with served(tmp_path, max_file_bytes=2000, max_tenant_file_bytes=2500) as there:
        async with there.client() as client:
            with pytest.raises(openai.APIStatusError) as large:
                await client.files.create(file=("in", lines([chat("x" * 3000)])), purpose="batch")
            assert large.value.status_code == 413
            content = lines([chat("x" * 1500)])
            file = await client.files.create(file=("in", content), purpose="batch")
            with pytest.raises(openai.APIStatusError) as full:
                await client.files.create(file=("in", content), purpose="batch")
            assert full.value.status_code == 413
            await client.files.delete(file.id)
            await client.files.create(file=("in", content), purpose="batch")

        async def endless() -> AsyncIterator[bytes]:
            yield b'--b\r\ncontent-disposition: form-data; name="file"; filename="x"\r\n\r\n'
            for _ in range(400):
                yield b"x" * 1000

        async with plain_client() as plain:
            headers = {"content-type": "multipart/form-data; boundary=b"}
            answer = await plain.post(
                f"http://{there.address}/v1/files", content=endless(), headers=headers
            )
        assert answer.status_code == 413
    assert not list((tmp_path / "incoming").iterdir())
    assert len(list((tmp_path / "files").iterdir())) == 1


FORMS: tuple[tuple[dict[str, str], bool, dict[str, str], int], ...] = (
    ({}, True, {}, 400),
    ({"purpose": "fine-tune"}, True, {}, 400),
    ({"purpose": "batch"}, False, {}, 400),
    ({"purpose": "batch"}, True, {"origin": "https://evil.example"}, 403),
    ({"purpose": "x" * 10_000}, True, {}, 400),
    ({"purpose": "batch"}, True, {}, 200),
    ({"purpose": "batch", **EXPIRES}, True, {}, 200),
    ({"purpose": "batch", **EXPIRES, "expires_after[anchor]": "now"}, True, {}, 400),
    ({"purpose": "batch", **EXPIRES, "expires_after[seconds]": "60"}, True, {}, 400),
    ({"purpose": "batch", **EXPIRES, "expires_after[seconds]": "-3600"}, True, {}, 400),
    ({"purpose": "batch", "expires_after[seconds]": "3600"}, True, {}, 400),
)


async def test_forms(tmp_path: Path) -> None:
    async with served(tmp_path) as there, plain_client() as plain:
        for fields, file, headers, status in FORMS:
            files = {"file" if file else "other": ("in.jsonl", lines([chat()]))}
            answer = await plain.post(
                f"http://{there.address}/v1/files", data=fields, files=files, headers=headers
            )
            assert answer.status_code == status, (fields, answer.text)
            if status != 200:
                check_schema(answer.json(), "ErrorResponse")
                continue
            expected = 3600 if "expires_after[seconds]" in fields else 30 * 86400
            at = answer.json()["expires_at"]
            assert at - answer.json()["created_at"] == expected
        for bad in (b"", b"--b\r\nnonsense", b"\x00" * 100):
            kind = {"content-type": "multipart/form-data; boundary=b"}
            answer = await plain.post(f"http://{there.address}/v1/files", content=bad, headers=kind)
            assert answer.status_code == 400
        answer = await plain.post(f"http://{there.address}/v1/files", json={})
        assert answer.status_code == 400


CHANGES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"endpoint": "/v1/moderations"}, 400),
    ({"completion_window": "soon"}, 400),
    ({"completion_window": "31d"}, 400),
    ({"completion_window": "0h"}, 400),
    ({"input_file_id": "file-none"}, 404),
    ({"input_file_id": None}, 400),
    ({"metadata": {str(n): "x" for n in range(17)}}, 400),
    ({"metadata": {"a": "x" * 513}}, 400),
    ({"metadata": {"a": 1}}, 400),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 60}}, 400),
    ({"output_expires_after": {"anchor": "now", "seconds": 3600}}, 400),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, 200),
    ({"completion_window": "90m"}, 200),
    ({"metadata": None}, 200),
)


async def test_batches_are_checked(tmp_path: Path) -> None:
    async with served(tmp_path) as there, there.client() as client, plain_client() as plain:
        file = await client.files.create(file=("in.jsonl", lines([chat()])), purpose="batch")
        usual = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h"}
        for changes, status in CHANGES:
            body = {**usual, **changes}
            answer = await plain.post(f"http://{there.address}/v1/batches", json=body)
            assert answer.status_code == status, (changes, answer.text)
            if status == 200:
                Batch.model_validate(answer.json(), strict=True)


async def test_lists_have_pages(tmp_path: Path) -> None:
    async with served(tmp_path) as there, there.client() as client:
        assert [file async for file in client.files.list()] == []
        made: list[FileObject] = []
        for number in range(5):
            content = (f"{number}.jsonl", lines([chat()]))
            made.append(await client.files.create(file=content, purpose="batch"))
        # Its client follows the pages by itself.
        listed = [file.id async for file in client.files.list(limit=2, order="asc")]
        assert listed == [file.id for file in made]
        batches = [
            await client.batches.create(
                input_file_id=file.id, endpoint=CHAT, completion_window="24h"
            )
            for file in made
        ]
        listed = [batch.id async for batch in client.batches.list(limit=2)]
        assert listed == [batch.id for batch in reversed(batches)]


MISSING = (
    ("GET", "/v1/files/file-none"),
    ("GET", "/v1/files/file-none/content"),
    ("GET", "/v1/files/..%2f..%2fetc%2fpasswd/content"),
    ("DELETE", "/v1/files/file-none"),
    ("GET", "/v1/batches/batch_none"),
    ("POST", "/v1/batches/batch_none/cancel"),
)


async def test_what_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with served(folder) as there, plain_client() as plain:
        for method, path in MISSING:
            answer = await plain.request(method, f"http://{there.address}{path}")
            assert answer.status_code == 404, path
            check_schema(answer.json(), "ErrorResponse")
    assert not folder.exists()


async def test_one_of_several_routers_needs_a_store_that_they_share(tmp_path: Path) -> None:
    async with served(tmp_path / "data", replicated=True) as there, plain_client() as plain:
        url = f"http://{there.address}/v1"
        for method, path in (
            ("POST", "files"),
            ("GET", "files"),
            ("GET", "files/file-1"),
            ("DELETE", "files/file-1"),
            ("GET", "files/file-1/content"),
            ("POST", "batches"),
            ("GET", "batches"),
            ("GET", "batches/batch_1"),
            ("POST", "batches/batch_1/cancel"),
        ):
            answer = await plain.request(method, f"{url}/{path}")
            assert answer.status_code == 501, path
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("server_error", "not_configured")
            assert "BATON_BATCH_STORE" in error["message"]
    assert not (tmp_path / "data").exists()


async def test_routers_of_one_host_need_no_shared_store(tmp_path: Path) -> None:
    async with (
        served(tmp_path, replicated=True, batch_store="local") as there,
        there.client() as client,
    ):
        file = await client.files.create(file=("in.jsonl", lines([chat()])), purpose="batch")
        assert [one.id for one in (await client.files.list()).data] == [file.id]
    assert (tmp_path / "batches.sqlite").exists()


async def test_routers_that_share_a_store_answer_alike(redis_url: str, tmp_path: Path) -> None:
    """Each has a disk of its own."""
    config: dict[str, Any] = {
        "batch_store": str(tmp_path / "shared"),
        "redis_url": redis_url,
        "cluster_id": str(tmp_path),
    }
    content = lines([chat(str(number)) for number in range(3)])
    async with (
        served(tmp_path / "one", replicated=True, **config) as first,
        served(tmp_path / "other", replicated=True, **config) as second,
        first.client() as one,
        second.client() as other,
    ):
        file = await one.files.create(file=("in.jsonl", content), purpose="batch")
        batch = await other.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h"
        )
        async with asyncio.timeout(DEADLINE_S):
            while batch.status != "completed":
                await asyncio.sleep(0.05)
                batch = await one.batches.retrieve(batch.id)
        assert batch.output_file_id is not None
        told = [await at.files.content(batch.output_file_id) for at in (one, other)]
        rows = [json.loads(row) for row in told[0].text.splitlines()]
        assert [row["custom_id"] for row in rows] == ["c-0", "c-1", "c-2"]
        assert told[0].text == told[1].text
        listed = await other.files.list()
        assert [each.id for each in listed.data] == [batch.output_file_id, file.id]
    assert not (tmp_path / "one").exists()


async def test_files_in_a_bucket_are_sent_to_clients(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket_server(monkeypatch) as url:
        config: dict[str, Any] = {
            "batch_store": url,
            "redis_url": redis_url,
            "cluster_id": str(tmp_path),
        }
        content = lines([chat("x" * 1000) for _ in range(500)])
        async with served(tmp_path, **config) as there, there.client() as client:
            file = await client.files.create(file=("in.jsonl", content), purpose="batch")
            got = await client.files.content(file.id)
            assert got.content == content
            assert got.response.headers["content-length"] == str(len(content))
            await client.files.delete(file.id)
            with pytest.raises(openai.NotFoundError):
                await client.files.content(file.id)


async def test_a_disk_that_cannot_be_written_is_no_internal_error(tmp_path: Path) -> None:
    """Everything that needs no storage is served."""
    blocked = tmp_path / "data"
    blocked.touch()
    async with served(blocked) as there, there.client() as client:
        with pytest.raises(openai.InternalServerError) as caught:
            await client.files.create(file=("in.jsonl", lines([chat()])), purpose="batch")
        assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
        assert "data_dir" in caught.value.message
        answer = await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}]
        )
        assert answer.choices
