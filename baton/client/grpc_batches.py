"""Files and batches of a router's gRPC front, for programs without an event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import grpc

from baton.client import grpc_wire as wire
from baton.client.values import NOTHING, BatchInfo, FileInfo
from baton.v1 import batches_pb2, files_pb2
from baton.v1.batches_pb2_grpc import BatchServiceStub
from baton.v1.files_pb2_grpc import FileServiceStub

CALL_DEADLINE_S = 30.0
UPLOAD_DEADLINE_S = 300.0
"""Of what carries a file's contents."""


class BatchCalls:
    """Part of ``Client``. Its methods raise BatonError."""

    def __init__(
        self, channel: grpc.Channel, address: str, metadata: tuple[tuple[str, str], ...]
    ) -> None:
        self._address = address
        self._metadata = metadata
        self._files = FileServiceStub(channel)
        self._batches = BatchServiceStub(channel)

    def upload(
        self,
        content: BinaryIO | bytes,
        filename: str = "batch.jsonl",
        *,
        expires_s: int | None = None,
    ) -> FileInfo:
        """Upload a batch's input: lines of JSON. ``expires_s`` after that it is deleted."""
        parts = wire.upload_parts(content, filename, expires_s)
        answer = self._ask(self._files.UploadFile, parts, UPLOAD_DEADLINE_S)
        return wire.file(answer.file)

    def file(self, file_id: str) -> FileInfo:
        request = files_pb2.GetFileRequest(file_id=file_id)
        return wire.file((self._ask(self._files.GetFile, request)).file)

    def download(self, file_id: str, path: Path) -> None:
        """Write a file's contents to ``path``. Raises OSError too."""
        request = files_pb2.DownloadFileRequest(file_id=file_id)
        call = self._files.DownloadFile(request, timeout=UPLOAD_DEADLINE_S, metadata=self._metadata)
        try:
            first = next(call, None)
            with path.open("wb") as file:
                if first is not None:
                    file.write(first.data)
                for piece in call:
                    file.write(piece.data)
        except grpc.RpcError as error:
            raise wire.meant(error, self._address) from error
        finally:
            call.cancel()

    def delete_file(self, file_id: str) -> None:
        self._ask(self._files.DeleteFile, files_pb2.DeleteFileRequest(file_id=file_id))

    def create_batch(
        self,
        input_file_id: str,
        endpoint: str = "/v1/chat/completions",
        *,
        completion_window: str = "24h",
        metadata: Mapping[str, str] = NOTHING,
    ) -> BatchInfo:
        """Begin a batch over an uploaded file."""
        request = wire.batch_request(input_file_id, endpoint, completion_window, metadata)
        return wire.batch((self._ask(self._batches.CreateBatch, request)).batch)

    def batch(self, batch_id: str) -> BatchInfo:
        """How far a batch has come."""
        request = batches_pb2.GetBatchRequest(batch_id=batch_id)
        return wire.batch((self._ask(self._batches.GetBatch, request)).batch)

    def cancel_batch(self, batch_id: str) -> BatchInfo:
        """End a batch early."""
        request = batches_pb2.CancelBatchRequest(batch_id=batch_id)
        return wire.batch((self._ask(self._batches.CancelBatch, request)).batch)

    def _ask(
        self, method: Callable[..., Any], request: Any, deadline_s: float = CALL_DEADLINE_S
    ) -> Any:
        try:
            return method(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.meant(error, self._address) from error
