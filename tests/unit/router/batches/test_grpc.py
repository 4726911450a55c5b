"""Files and batches over gRPC: what HTTP has, in messages."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.config import KeyConfig, TenantConfig
from baton.grpc_channel import make_server, open_channel
from baton.request import FinishReason
from baton.v1 import batches_pb2, batches_pb2_grpc, files_pb2, files_pb2_grpc
from router.access import Access
from router.batches.batches import Batches
from router.generation import GenerationRequest, OutputDelta
from router.grpc_front import add_grpc_front
from tests.unit.router.front_fakes import MODEL, Front, make_front

DEADLINE_S = 30.0
KEYS = (
    KeyConfig(name="ann", sha256=hashlib.sha256(b"ann-key").hexdigest(), tenant="acme"),
    KeyConfig(name="bob", sha256=hashlib.sha256(b"bob-key").hexdigest()),
)


@dataclass
class There:
    """A router's gRPC front with files and batches."""

    front: Front
    files: Any
    batches: Any

    async def upload(self, content: bytes, key: str = "", **about: Any) -> files_pb2.File:
        answer = await self.files.UploadFile(
            parts(content, **about), timeout=DEADLINE_S, metadata=of(key)
        )
        file: files_pb2.File = answer.file
        return file

    async def download(self, file_id: str) -> bytes:
        request = files_pb2.DownloadFileRequest(file_id=file_id)
        pieces = self.files.DownloadFile(request, timeout=DEADLINE_S)
        return b"".join([piece.data async for piece in pieces])

    async def ended(self, batch: batches_pb2.Batch) -> batches_pb2.Batch:
        request = batches_pb2.GetBatchRequest(batch_id=batch.id)
        async with asyncio.timeout(DEADLINE_S):
            while not (batch.times.HasField("completed") or batch.times.HasField("failed")):
                await asyncio.sleep(0.02)
                batch = (await self.batches.GetBatch(request, timeout=DEADLINE_S)).batch
        return batch


@asynccontextmanager
async def serving(folder: Path, **config: Any) -> AsyncIterator[There]:
    front = make_front(data_dir=str(folder), **config)
    access = Access(front.config, front.metrics)
    parts = (front.dispatcher, front.tokenizer, MODEL, front.metrics, front.config, access)
    batches = Batches(*parts)
    server = make_server()
    add_grpc_front(server, *parts, more=batches.services)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await batches.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield There(
                front,
                files_pb2_grpc.FileServiceStub(channel),
                batches_pb2_grpc.BatchServiceStub(channel),
            )
    finally:
        await server.stop(0)
        await batches.stop()
        await batches.close()


def parts(content: bytes, size: int = 1000, **about: Any) -> Iterator[files_pb2.UploadFileRequest]:
    description = files_pb2.FileDescription(**about)
    yield files_pb2.UploadFileRequest(description=description)
    for place in range(0, len(content), size):
        yield files_pb2.UploadFileRequest(data=content[place : place + size])


def of(key: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {key}"),) if key else ()


def line(name: str = "a", url: str = "/v1/completions", **body: Any) -> bytes:
    body = {"model": "tiny", **(body or {"prompt": "x", "max_tokens": 2})}
    row = {"custom_id": name, "method": "POST", "url": url, "body": body}
    return json.dumps(row).encode() + b"\n"


async def test_a_batch_from_upload_to_results(tmp_path: Path) -> None:
    async with serving(tmp_path) as there:
        content = b"".join(line(f"c-{n}") for n in range(30)) + line("bad", n=-1)
        assert len(content) > 3000
        file = await there.upload(content, filename="in.jsonl")
        assert (file.filename, file.purpose, file.size) == ("in.jsonl", "batch", len(content))
        assert not file.HasField("expires_at")
        assert await there.download(file.id) == content
        asked = files_pb2.GetFileRequest(file_id=file.id)
        assert (await there.files.GetFile(asked, timeout=DEADLINE_S)).file == file
        begun = await there.batches.CreateBatch(
            batches_pb2.CreateBatchRequest(
                input_file_id=file.id,
                endpoint="/v1/completions",
                metadata={"job": "seven"},
                output_expires_after_seconds=3600,
            ),
            timeout=DEADLINE_S,
        )
        assert begun.batch.status == batches_pb2.BATCH_STATUS_VALIDATING
        assert begun.batch.completion_window == "24h"
        batch = await there.ended(begun.batch)
        assert batch.status == batches_pb2.BATCH_STATUS_COMPLETED
        assert (batch.total, batch.completed, batch.failed) == (31, 30, 1)
        assert batch.metadata == {"job": "seven"}
        assert batch.completion_tokens == 60
        assert batch.model == "tiny"
        records = (await there.download(batch.output_file_id)).decode().splitlines()
        assert [json.loads(row)["custom_id"] for row in records] == [f"c-{n}" for n in range(30)]
        asked = files_pb2.GetFileRequest(file_id=batch.output_file_id)
        output = (await there.files.GetFile(asked, timeout=DEADLINE_S)).file
        assert output.expires_at == output.created_at + 3600
        listed = await there.batches.ListBatches(
            batches_pb2.ListBatchesRequest(), timeout=DEADLINE_S
        )
        assert list(listed.batches) == [batch]
        assert not listed.has_more
        cancel = batches_pb2.CancelBatchRequest(batch_id=batch.id)
        assert await code_of(there.batches.CancelBatch(cancel)) is Status.INVALID_ARGUMENT
        delete = files_pb2.DeleteFileRequest(file_id=file.id)
        await there.files.DeleteFile(delete, timeout=DEADLINE_S)
        assert await code_of(there.files.DeleteFile(delete)) is Status.NOT_FOUND


Status = grpc.StatusCode


async def code_of(call: Any) -> grpc.StatusCode:
    async with asyncio.timeout(DEADLINE_S):
        found: grpc.StatusCode = await call.code()
        return found


async def test_faults_are_told(tmp_path: Path) -> None:
    async with serving(tmp_path) as there:
        file = await there.upload(line(), filename="in.jsonl")
        begun = await there.batches.CreateBatch(
            batches_pb2.CreateBatchRequest(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="1h"
            ),
            timeout=DEADLINE_S,
        )
        batch = await there.ended(begun.batch)
        assert batch.status == batches_pb2.BATCH_STATUS_FAILED
        (fault,) = batch.faults
        assert (fault.line, fault.param, fault.code) == (1, "url", "mismatched_endpoint")
        assert not batch.HasField("output_file_id")


async def test_responses_are_an_endpoint_of_batches(tmp_path: Path) -> None:
    async with serving(tmp_path) as there:
        url = "/v1/responses"
        content = line("a", url, input="hello", max_output_tokens=3) + line("b", url, input=[])
        file = await there.upload(content, filename="in.jsonl")
        begun = await there.batches.CreateBatch(
            batches_pb2.CreateBatchRequest(input_file_id=file.id, endpoint=url), timeout=DEADLINE_S
        )
        batch = await there.ended(begun.batch)
        assert (batch.completed, batch.failed) == (1, 1)
        record = json.loads(await there.download(batch.output_file_id))
        body = record["response"]["body"]
        assert (record["custom_id"], body["object"]) == ("a", "response")
        assert body["usage"]["output_tokens"] == 3
        assert (batch.prompt_tokens, batch.completion_tokens) == (body["usage"]["input_tokens"], 3)
        assert there.front.dispatcher.requests[0].background


async def test_embeddings_are_an_endpoint_of_batches(tmp_path: Path) -> None:
    async def embedding(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("", (), FinishReason.LENGTH, embedding=(1.0, 0.0))

    async with serving(tmp_path) as there:
        there.front.dispatcher.script = embedding
        url = "/v1/embeddings"
        content = line("a", url, input=[[5, 6], [7]]) + line("b", url, input=[])
        file = await there.upload(content, filename="in.jsonl")
        begun = await there.batches.CreateBatch(
            batches_pb2.CreateBatchRequest(input_file_id=file.id, endpoint=url), timeout=DEADLINE_S
        )
        batch = await there.ended(begun.batch)
        assert (batch.completed, batch.failed) == (1, 1)
        record = json.loads(await there.download(batch.output_file_id))
        vectors = [one["embedding"] for one in record["response"]["body"]["data"]]
        assert vectors == [[1.0, 0.0], [1.0, 0.0]]
        assert (batch.prompt_tokens, batch.completion_tokens) == (3, 0)
        assert all(request.background for request in there.front.dispatcher.requests)


async def test_a_key_sees_its_tenants_alone(tmp_path: Path) -> None:
    tenants = (TenantConfig(name="acme"),)
    async with serving(tmp_path, keys=KEYS, tenants=tenants, require_key=True) as there:
        file = await there.upload(line(), "ann-key", filename="in.jsonl")
        get = files_pb2.GetFileRequest(file_id=file.id)
        for key, code in (
            ("ann-key", Status.OK),
            ("bob-key", Status.NOT_FOUND),
            ("", Status.UNAUTHENTICATED),
            ("wrong", Status.UNAUTHENTICATED),
        ):
            assert await code_of(there.files.GetFile(get, metadata=of(key))) is code
        listed = await there.files.ListFiles(
            files_pb2.ListFilesRequest(), timeout=DEADLINE_S, metadata=of("bob-key")
        )
        assert not listed.files
        # Nothing is written: grpc.aio tells INTERNAL or CANCELLED where a call ends amid a write.
        upload = there.files.UploadFile(timeout=DEADLINE_S)
        assert await upload.code() is Status.UNAUTHENTICATED
        listed = await there.files.ListFiles(
            files_pb2.ListFilesRequest(), timeout=DEADLINE_S, metadata=of("ann-key")
        )
        assert len(listed.files) == 1


async def test_lists_have_pages(tmp_path: Path) -> None:
    async with serving(tmp_path) as there:
        names = [(await there.upload(line(), filename=str(n))).id for n in range(3)]
        ask = files_pb2.ListFilesRequest
        first = await there.files.ListFiles(ask(limit=2, ascending=True), timeout=DEADLINE_S)
        assert ([file.id for file in first.files], first.has_more) == (names[:2], True)
        rest = await there.files.ListFiles(ask(after=names[1], ascending=True), timeout=DEADLINE_S)
        assert ([file.id for file in rest.files], rest.has_more) == (names[2:], False)
        newest = await there.files.ListFiles(ask(limit=1), timeout=DEADLINE_S)
        assert [file.id for file in newest.files] == names[2:]
        too_many = there.files.ListFiles(ask(limit=10_001))
        assert await code_of(too_many) is Status.INVALID_ARGUMENT


async def test_uploads_are_checked(tmp_path: Path) -> None:
    request, describe = files_pb2.UploadFileRequest, files_pb2.FileDescription
    described = request(description=describe(filename="x"))
    async with serving(tmp_path, file_most_bytes=2000) as there:
        for messages, code in (
            ([], Status.INVALID_ARGUMENT),
            ([request(data=line())], Status.INVALID_ARGUMENT),
            ([described, described], Status.INVALID_ARGUMENT),
            ([described], Status.INVALID_ARGUMENT),
            ([described, request(data=b"{")], Status.INVALID_ARGUMENT),
            ([described, *[request(data=b"x" * 900)] * 3], Status.INVALID_ARGUMENT),
            (list(parts(line(), expires_after_seconds=60)), Status.INVALID_ARGUMENT),
        ):
            call = there.files.UploadFile(iter(messages), timeout=DEADLINE_S)
            # gRPC itself cancels a call that was refused while it still writes.
            assert await code_of(call) in (code, Status.CANCELLED), messages
        listed = await there.files.ListFiles(files_pb2.ListFilesRequest(), timeout=DEADLINE_S)
        assert not listed.files
        kept = await there.upload(line(), expires_after_seconds=3600)
        assert (kept.filename, kept.expires_at) == ("file", kept.created_at + 3600)


async def test_what_is_not_there(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    async with serving(folder) as there:
        for call in (
            there.files.GetFile(files_pb2.GetFileRequest(file_id="file-1")),
            there.files.DeleteFile(files_pb2.DeleteFileRequest(file_id="../x")),
            there.batches.GetBatch(batches_pb2.GetBatchRequest(batch_id="batch_1")),
            there.batches.CancelBatch(batches_pb2.CancelBatchRequest(batch_id="batch_1")),
            there.batches.CreateBatch(
                batches_pb2.CreateBatchRequest(input_file_id="x", endpoint="/v1/completions")
            ),
            there.files.DownloadFile(files_pb2.DownloadFileRequest(file_id="file-1")),
        ):
            assert await code_of(call) is Status.NOT_FOUND
        bad = batches_pb2.CreateBatchRequest(input_file_id="x", endpoint="/v1/models")
        assert await code_of(there.batches.CreateBatch(bad)) is Status.INVALID_ARGUMENT
    assert not folder.exists()
