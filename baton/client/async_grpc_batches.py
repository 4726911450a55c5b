"""Files and batches of a router's gRPC front, for asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import grpc.aio

from baton.client import grpc_wire as wire
from baton.client.values import NOTHING, BatchInfo, FileInfo
from baton.v1 import batches_pb2, files_pb2
from baton.v1.batches_pb2_grpc import BatchServiceStub
from baton.v1.files_pb2_grpc import FileServiceStub

CALL_DEADLINE_S = 30.0
UPLOAD_DEADLINE_S = 300.0
"""Of what carries a file's contents."""


class AsyncBatchCalls:
    """Part of ``AsyncClient``. Its methods raise BatonError."""

    def __init__(
        self, channel: grpc.aio.Channel, address: str, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        self._address = address
        self._metadata = metadata
        self._files = FileServiceStub(channel)
        self._batches = BatchServiceStub(channel)

    async def upload(
        self, content: bytes, filename: str = "batch.jsonl", *, expires_s: int | None = None
    ) -> FileInfo:
        """Upload a batch's input: lines of JSON. ``expires_s`` after that it is deleted."""
        parts = wire.upload_parts(content, filename, expires_s)
        answer = await self._ask(self._files.UploadFile, parts, UPLOAD_DEADLINE_S)
        return wire.file(answer.file)

    async def file(self, file_id: str) -> FileInfo:
        request = files_pb2.GetFileRequest(file_id=file_id)
        return wire.file((await self._ask(self._files.GetFile, request)).file)

    async def download(self, file_id: str, path: Path) -> None:
        """Write a file's contents to ``path``. Raises OSError too."""
        request = files_pb2.DownloadFileRequest(file_id=file_id)
        call = self._files.DownloadFile(request, timeout=UPLOAD_DEADLINE_S, metadata=self._metadata)
        try:
            first = await anext(aiter(call), None)
            with await asyncio.to_thread(path.open, "wb") as file:
                if first is not None:
                    await asyncio.to_thread(file.write, first.data)
                async for piece in call:
                    await asyncio.to_thread(file.write, piece.data)
        except grpc.aio.AioRpcError as error:
            raise wire.meant(error, self._address) from error
        finally:
            call.cancel()

    async def delete_file(self, file_id: str) -> None:
        await self._ask(self._files.DeleteFile, files_pb2.DeleteFileRequest(file_id=file_id))

    async def create_batch(
        self,
        input_file_id: str,
        endpoint: str = "/v1/chat/completions",
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] = NOTHING,
    ) -> BatchInfo:
        """Begin a batch over an uploaded file."""
        request = wire.batch_request(input_file_id, endpoint, completion_window, metadata)
        return wire.batch((await self._ask(self._batches.CreateBatch, request)).batch)

    async def batch(self, batch_id: str) -> BatchInfo:
        """How far a batch has come."""
        request = batches_pb2.GetBatchRequest(batch_id=batch_id)
        return wire.batch((await self._ask(self._batches.GetBatch, request)).batch)

    async def cancel_batch(self, batch_id: str) -> BatchInfo:
        """End a batch early."""
        request = batches_pb2.CancelBatchRequest(batch_id=batch_id)
        return wire.batch((await self._ask(self._batches.CancelBatch, request)).batch)

    async def _ask(
        self,
        method: Callable[..., Awaitable[Any]],
        request: Any,
        deadline_s: float = CALL_DEADLINE_S,
    ) -> Any:
        try:
            return await method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise wire.meant(error, self._address) from error
