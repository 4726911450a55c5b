"""The endpoints of files and batches. They raise BatonError, which ``router.http.errors`` converts
to a response."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from fastapi import Depends, FastAPI, Query, Request
from starlette.responses import FileResponse, Response, StreamingResponse

from baton.config.cluster import Config
from baton.errors import InvalidRequest, NotConfigured
from router.batches.batch_planner import BatchPlanner
from router.batches.protocol import (
    BatchList,
    BatchObject,
    CreateBatchRequest,
    FileDeleted,
    FileList,
    FileObject,
)
from router.batches.service import (
    DEFAULT_BATCHES,
    MAX_BATCHES,
    MAX_FILES,
    MIN_EXPIRY_S,
    BatchService,
)
from router.batches.storage.batch import Batch, StoredFile
from router.batches.upload import receive_upload
from router.http.client import SMALL_BYTES, caller_of, read_object
from router.http.fields import validate
from router.http.openapi import body, json_body, made_of_its_id

_FILES, _FILE, _CONTENT = "/v1/files", "/v1/files/{file_id}", "/v1/files/{file_id}/content"
_BATCHES, _BATCH = "/v1/batches", "/v1/batches/{batch_id}"
_CANCEL = "/v1/batches/{batch_id}/cancel"
_FORM = body(
    {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"type": "string", "enum": ["batch"]},
                    "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                    "expires_after[seconds]": {"type": "integer", "minimum": MIN_EXPIRY_S},
                },
            }
        }
    }
)
_FILE_MADE: dict[int | str, dict[str, Any]] = {
    200: made_of_its_id("file_id", ("get", _FILE), ("get", _CONTENT), ("delete", _FILE)),
}
_BATCH_MADE: dict[int | str, dict[str, Any]] = {
    200: made_of_its_id("batch_id", ("get", _BATCH), ("post", _CANCEL))
}


class BatchesApi:
    """Handlers of the endpoints of files and batches. An API key sees only the files and batches of
    its tenant."""

    def __init__(
        self, service: BatchService, planner: BatchPlanner, config: Config, off: str = ""
    ) -> None:
        """Create the handlers. ``off``: why files and batches are not available here; empty if they
        are."""
        self._off = off
        self._service = service
        self._planner = planner
        self._config = config

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""
        add = partial(
            app.add_api_route, tags=["batches"], dependencies=[Depends(self._check_available)]
        )
        add(_FILES, self.create_file, methods=["POST"], openapi_extra=_FORM, responses=_FILE_MADE)
        add(_FILES, self.list_files)
        add(_FILE, self.get_file)
        add(_FILE, self.delete_file, methods=["DELETE"])
        add(_CONTENT, self.get_content, response_model=None)
        asked = json_body(CreateBatchRequest)
        add(
            _BATCHES,
            self.create_batch,
            methods=["POST"],
            openapi_extra=asked,
            responses=_BATCH_MADE,
        )
        add(_BATCHES, self.list_batches)
        add(_BATCH, self.get_batch)
        add(_CANCEL, self.cancel_batch, methods=["POST"])

    async def _check_available(self) -> None:
        if self._off:
            raise NotConfigured(self._off)

    # Files

    async def create_file(self, request: Request) -> FileObject:
        """Upload the input of a batch: a form with `file` and `purpose=batch`. Each line is
        checked.
        """
        tenant = caller_of(request).principal.tenant
        config = self._config
        async with self._service.incoming(tenant) as incoming:
            upload = await receive_upload(
                request, incoming.write, config.max_file_bytes, config.request_deadline_s
            )
            if upload.purpose != "batch":
                raise InvalidRequest("purpose must be 'batch'", param="purpose")
            file = await self._service.add_file(incoming, upload.filename, upload.expires_s)
        return FileObject.of(file)

    async def list_files(
        self,
        request: Request,
        purpose: str = "",
        after: str = "",
        limit: int = Query(default=MAX_FILES, ge=1, le=MAX_FILES),
        order: Literal["asc", "desc"] = "desc",
    ) -> FileList:
        """List files, newest first unless `order=asc`."""
        tenant = caller_of(request).principal.tenant
        page = await self._service.files(tenant, purpose, after, limit, ascending=order == "asc")
        first, last = _ends(page.entries)
        data = [FileObject.of(file) for file in page.entries]
        return FileList(data=data, first_id=first, last_id=last, has_more=page.has_more)

    async def get_file(self, request: Request, file_id: str) -> FileObject:
        """Describe a file."""
        return FileObject.of(await self._service.file(caller_of(request).principal.tenant, file_id))

    async def get_content(self, request: Request, file_id: str) -> Response:
        """Return the contents of a file."""
        content = await self._service.content(caller_of(request).principal.tenant, file_id)
        # Serve octets, so that a browser does not run a client's text.
        kind = "application/octet-stream"
        if isinstance(content, Path):
            return FileResponse(content, media_type=kind)
        length = {"content-length": str(content.size)}
        return StreamingResponse(content.pieces, headers=length, media_type=kind)

    async def delete_file(self, request: Request, file_id: str) -> FileDeleted:
        """Delete a file, unless a batch needs it."""
        await self._service.delete_file(caller_of(request).principal.tenant, file_id)
        return FileDeleted(id=file_id)

    # Batches

    async def create_batch(self, request: Request) -> BatchObject:
        """Start a batch."""
        principal = caller_of(request).principal
        config = self._config
        raw = await read_object(request, SMALL_BYTES, config.request_deadline_s)
        asked = validate(CreateBatchRequest, raw)
        expiry = asked.output_expires_after
        batch = await self._service.create_batch(
            principal,
            asked.input_file_id,
            asked.endpoint,
            asked.completion_window,
            asked.metadata or {},
            None if expiry is None else expiry.seconds,
        )
        return BatchObject.of(batch)

    async def list_batches(
        self,
        request: Request,
        after: str = "",
        limit: int = Query(default=DEFAULT_BATCHES, ge=1, le=MAX_BATCHES),
    ) -> BatchList:
        """List batches, newest first."""
        page = await self._service.batches(caller_of(request).principal.tenant, after, limit)
        first, last = _ends(page.entries)
        schedules = await self._planner.plan()
        data = [BatchObject.of(batch, schedules.get(batch.id)) for batch in page.entries]
        return BatchList(data=data, first_id=first, last_id=last, has_more=page.has_more)

    async def get_batch(self, request: Request, batch_id: str) -> BatchObject:
        """Describe a batch and its progress."""
        batch = await self._service.batch(caller_of(request).principal.tenant, batch_id)
        schedules = await self._planner.plan() if batch.unfinished else {}
        return BatchObject.of(batch, schedules.get(batch.id))

    async def cancel_batch(self, request: Request, batch_id: str) -> BatchObject:
        """End a batch early. Its results so far become its files."""
        return BatchObject.of(
            await self._service.cancel(caller_of(request).principal.tenant, batch_id)
        )


def _ends(entries: Sequence[StoredFile | Batch]) -> tuple[str | None, str | None]:
    """Return the ids of the first and the last entry of a page; None for an empty page."""
    return (entries[0].id, entries[-1].id) if entries else (None, None)
