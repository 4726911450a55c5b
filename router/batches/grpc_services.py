"""baton.v1.FileService and BatchService."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import BinaryIO, cast

import grpc.aio

from baton.config import Config
from baton.errors import InvalidRequest, NotFound, RequestTooLarge
from baton.grpc_errors import grpc_boundary, guarded
from baton.request import Principal
from baton.v1 import batches_pb2, batches_pb2_grpc, files_pb2, files_pb2_grpc
from router.access import Access
from router.batches.batch import Batch, BatchStatus, StoredFile
from router.batches.desk import DEFAULT_BATCHES, DEFAULT_WINDOW, MOST_FILES, BatchDesk
from router.grpc_call import Context, check_size, metadata_of, write_to

PIECE_BYTES = 1 << 20
_IN_MEMORY_BYTES = 1 << 20
"""Of an upload; the rest of it is kept on the disk until it is whole."""
_MOST_NAME_CHARACTERS = 255
_STATUSES = {
    status: batches_pb2.BatchStatus.Value(f"BATCH_STATUS_{status.name}") for status in BatchStatus
}
_TIMES = tuple(batches_pb2.BatchTimes.DESCRIPTOR.fields_by_name)
_SAME = (
    "id",
    "endpoint",
    "model",
    "input_file_id",
    "completion_window",
    "output_file_id",
    "error_file_id",
    "created_at",
    "expires_at",
    "total",
    "completed",
    "failed",
    "prompt_tokens",
    "completion_tokens",
    "metadata",
)


class FileServicer(files_pb2_grpc.FileServiceServicer):
    """See files.proto."""

    def __init__(self, desk: BatchDesk, config: Config, access: Access) -> None:
        self._desk = desk
        self._config = config
        self._access = access

    def add_to(self, server: grpc.aio.Server) -> str:
        """See ``router.grpc_call.Service``."""
        files_pb2_grpc.add_FileServiceServicer_to_server(self, server)
        return files_pb2.DESCRIPTOR.services_by_name["FileService"].full_name

    @guarded
    async def UploadFile(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[files_pb2.UploadFileRequest], context: Context
    ) -> files_pb2.UploadFileResponse:
        """Take a batch's input in."""
        tenant = self._principal(context).tenant
        with tempfile.SpooledTemporaryFile(_IN_MEMORY_BYTES) as spooled:
            content = cast(BinaryIO, spooled)
            try:
                async with asyncio.timeout(self._config.request_deadline_s):
                    description = await self._receive(request_iterator, content)
            except TimeoutError:
                raise InvalidRequest("the file did not arrive in time") from None
            name = description.filename[:_MOST_NAME_CHARACTERS] or "file"
            given = description.HasField("expires_after_seconds")
            expires_s = description.expires_after_seconds if given else None
            file = await self._desk.add_file(tenant, content, name, expires_s)
        return files_pb2.UploadFileResponse(file=_file(file))

    async def _receive(
        self, requests: AsyncIterator[files_pb2.UploadFileRequest], content: BinaryIO
    ) -> files_pb2.FileDescription:
        most_bytes, size = self._config.file_most_bytes, 0
        description: files_pb2.FileDescription | None = None
        async for request in requests:
            begins = request.HasField("description")
            if begins != (description is None):
                raise InvalidRequest("the first message, and no other, describes the file")
            if begins:
                description = request.description
                continue
            size += len(request.data)
            if size > most_bytes:
                raise RequestTooLarge(f"the file is larger than {most_bytes} bytes")
            await asyncio.to_thread(content.write, request.data)
        if description is None:
            raise InvalidRequest("the first message describes the file")
        return description

    @guarded
    async def ListFiles(  # noqa: N802 - gRPC's name
        self, request: files_pb2.ListFilesRequest, context: Context
    ) -> files_pb2.ListFilesResponse:
        """A tenant's files."""
        page = await self._desk.files(
            self._principal(context).tenant,
            request.purpose,
            request.after,
            request.limit or MOST_FILES,
            ascending=request.ascending,
        )
        return files_pb2.ListFilesResponse(files=map(_file, page.entries), has_more=page.has_more)

    @guarded
    async def GetFile(  # noqa: N802 - gRPC's name
        self, request: files_pb2.GetFileRequest, context: Context
    ) -> files_pb2.GetFileResponse:
        """Describe a file."""
        file = await self._desk.file(self._principal(context).tenant, request.file_id)
        return files_pb2.GetFileResponse(file=_file(file))

    # A coroutine that writes: see ``router.grpc_front``.
    async def DownloadFile(  # type: ignore[override]  # noqa: N802
        self, request: files_pb2.DownloadFileRequest, context: Context
    ) -> None:
        """The contents of a file."""
        async with grpc_boundary(context):
            tenant = self._principal(context).tenant
            path = await self._desk.content(tenant, request.file_id)
            file = await asyncio.to_thread(_opened, path)
            try:
                while data := await asyncio.to_thread(file.read, PIECE_BYTES):
                    await write_to(context, files_pb2.DownloadFileResponse(data=data), self._config)
            finally:
                file.close()

    @guarded
    async def DeleteFile(  # noqa: N802 - gRPC's name
        self, request: files_pb2.DeleteFileRequest, context: Context
    ) -> files_pb2.DeleteFileResponse:
        """Delete a file."""
        await self._desk.delete_file(self._principal(context).tenant, request.file_id)
        return files_pb2.DeleteFileResponse()

    def _principal(self, context: Context) -> Principal:
        return self._access.caller(metadata_of(context)).principal


class BatchServicer(batches_pb2_grpc.BatchServiceServicer):
    """See batches.proto."""

    def __init__(self, desk: BatchDesk, config: Config, access: Access) -> None:
        self._desk = desk
        self._config = config
        self._access = access

    def add_to(self, server: grpc.aio.Server) -> str:
        """See ``router.grpc_call.Service``."""
        batches_pb2_grpc.add_BatchServiceServicer_to_server(self, server)
        return batches_pb2.DESCRIPTOR.services_by_name["BatchService"].full_name

    @guarded
    async def CreateBatch(  # noqa: N802 - gRPC's name
        self, request: batches_pb2.CreateBatchRequest, context: Context
    ) -> batches_pb2.CreateBatchResponse:
        """Begin a batch."""
        principal = self._principal(context)
        check_size(request, self._config)
        given = request.HasField("output_expires_after_seconds")
        batch = await self._desk.create_batch(
            principal,
            request.input_file_id,
            request.endpoint,
            request.completion_window or DEFAULT_WINDOW,
            request.metadata,
            request.output_expires_after_seconds if given else None,
        )
        return batches_pb2.CreateBatchResponse(batch=_batch(batch))

    @guarded
    async def ListBatches(  # noqa: N802 - gRPC's name
        self, request: batches_pb2.ListBatchesRequest, context: Context
    ) -> batches_pb2.ListBatchesResponse:
        """A tenant's batches."""
        tenant = self._principal(context).tenant
        page = await self._desk.batches(tenant, request.after, request.limit or DEFAULT_BATCHES)
        return batches_pb2.ListBatchesResponse(
            batches=map(_batch, page.entries), has_more=page.has_more
        )

    @guarded
    async def GetBatch(  # noqa: N802 - gRPC's name
        self, request: batches_pb2.GetBatchRequest, context: Context
    ) -> batches_pb2.GetBatchResponse:
        """Describe a batch."""
        batch = await self._desk.batch(self._principal(context).tenant, request.batch_id)
        return batches_pb2.GetBatchResponse(batch=_batch(batch))

    @guarded
    async def CancelBatch(  # noqa: N802 - gRPC's name
        self, request: batches_pb2.CancelBatchRequest, context: Context
    ) -> batches_pb2.CancelBatchResponse:
        """End a batch early."""
        batch = await self._desk.cancel(self._principal(context).tenant, request.batch_id)
        return batches_pb2.CancelBatchResponse(batch=_batch(batch))

    def _principal(self, context: Context) -> Principal:
        return self._access.caller(metadata_of(context)).principal


def _opened(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except FileNotFoundError:
        raise NotFound("the file's contents are gone", param="file_id") from None


def _file(file: StoredFile) -> files_pb2.File:
    return files_pb2.File(
        id=file.id,
        filename=file.filename,
        purpose=file.purpose,
        size=file.size,
        created_at=file.created_at,
        expires_at=file.expires_at,
    )


def _batch(batch: Batch) -> batches_pb2.Batch:
    return batches_pb2.Batch(
        **{name: getattr(batch, name) for name in _SAME},
        status=_STATUSES[batch.status],
        cached_prompt_tokens=batch.cached_tokens,
        times=batches_pb2.BatchTimes(**{name: getattr(batch, f"{name}_at") for name in _TIMES}),
        faults=_faults(batch),
    )


def _faults(batch: Batch) -> Iterable[batches_pb2.BatchFault]:
    for fault in batch.faults:
        yield batches_pb2.BatchFault(
            code=fault.code, message=fault.message, line=fault.line, param=fault.param
        )
