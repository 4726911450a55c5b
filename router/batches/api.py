"""The endpoints of files and batches. They raise BatonError; ``router.http_errors`` answers it."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import BinaryIO, Literal

from fastapi import FastAPI, Query, Request
from starlette.responses import FileResponse, Response

from baton.config import Config
from baton.errors import InvalidRequest, NotFound
from router.access import Access
from router.batches.batch import Batch
from router.batches.database import Database
from router.batches.line import ENDPOINTS, Fault, find_faults
from router.batches.protocol import (
    BatchList,
    BatchObject,
    CreateBatchRequest,
    FileDeleted,
    FileList,
    FileObject,
    check_metadata,
    window_s,
)
from router.batches.store import BatchStore
from router.batches.upload import uploaded
from router.http_body import read_object, validate

MOST_FILES = 10_000
MOST_BATCHES = 100
"""In one page of a list, as at OpenAI."""


class BatchesApi:
    """A key sees the files and batches of its tenant alone."""

    def __init__(
        self,
        store: BatchStore,
        model: str,
        config: Config,
        access: Access,
        on_change: Callable[[], None],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """``model`` is the id of what is served; ``on_change`` hears that there is work to do."""
        self._store = store
        self._model = model
        self._config = config
        self._access = access
        self._on_change = on_change
        self._unix_clock = unix_clock

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""
        for method, path, handler in (
            ("POST", "/v1/files", self.create_file),
            ("GET", "/v1/files", self.list_files),
            ("GET", "/v1/files/{file_id}", self.get_file),
            ("DELETE", "/v1/files/{file_id}", self.delete_file),
            ("POST", "/v1/batches", self.create_batch),
            ("GET", "/v1/batches", self.list_batches),
            ("GET", "/v1/batches/{batch_id}", self.get_batch),
            ("POST", "/v1/batches/{batch_id}/cancel", self.cancel_batch),
        ):
            app.add_api_route(path, handler, methods=[method], tags=["batches"])
        app.add_api_route(
            "/v1/files/{file_id}/content", self.get_content, tags=["batches"], response_model=None
        )

    # Files

    async def create_file(self, request: Request) -> FileObject:
        """Upload a batch's input: a form with `file` and `purpose=batch`. Each line is checked."""
        tenant = self._tenant(request)
        config = self._config
        async with uploaded(request, config.file_most_bytes, config.request_deadline_s) as upload:
            if upload.purpose != "batch":
                raise InvalidRequest("purpose must be 'batch'", param="purpose")
            await asyncio.to_thread(self._check_lines, upload.content)
            file = await self._store.add_file(upload.content, tenant, upload.filename, "batch")
        return FileObject.of(file)

    async def list_files(
        self,
        request: Request,
        purpose: str = "",
        after: str = "",
        limit: int = Query(default=MOST_FILES, ge=1, le=MOST_FILES),
        order: Literal["asc", "desc"] = "desc",
    ) -> FileList:
        """List files, newest first unless `order=asc`."""
        tenant = self._tenant(request)
        files = []
        if self._store.used:
            files = await self._store.ask(
                Database.files, tenant, purpose, after, limit + 1, ascending=order == "asc"
            )
        shown = files[:limit]
        return FileList(
            data=[FileObject.of(file) for file in shown],
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(files) > limit,
        )

    async def get_file(self, request: Request, file_id: str) -> FileObject:
        """Describe a file."""
        tenant = self._tenant(request)
        self._check_used("file")
        return FileObject.of(await self._store.ask(Database.file, file_id, tenant))

    async def get_content(self, request: Request, file_id: str) -> Response:
        """The contents of a file."""
        tenant = self._tenant(request)
        self._check_used("file")
        path = self._store.path(await self._store.ask(Database.file, file_id, tenant))
        if not path.exists():
            raise NotFound("the file's contents are gone", param="file_id")
        # Octets: whoever opens a client's text in a browser must not run it.
        return FileResponse(path, media_type="application/octet-stream")

    async def delete_file(self, request: Request, file_id: str) -> FileDeleted:
        """Delete a file, unless a batch needs it."""
        tenant = self._tenant(request)
        self._check_used("file")
        await self._store.delete_file(file_id, tenant)
        return FileDeleted(id=file_id)

    # Batches

    async def create_batch(self, request: Request) -> BatchObject:
        """Begin a batch."""
        caller = self._access.caller(request.headers)
        config = self._config
        raw = await read_object(request, config.max_body_bytes, config.request_deadline_s)
        body = validate(CreateBatchRequest, raw)
        if body.endpoint not in ENDPOINTS:
            raise InvalidRequest(
                f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint"
            )
        self._check_used("file")
        now = int(self._unix_clock())
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=caller.principal.tenant,
            key_id=caller.principal.key_id,
            model=self._model,
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + window_s(body.completion_window),
            metadata=check_metadata(body.metadata or {}),
        )
        await self._store.ask(Database.add_batch, batch)
        self._on_change()
        return BatchObject.of(batch)

    async def list_batches(
        self,
        request: Request,
        after: str = "",
        limit: int = Query(default=20, ge=1, le=MOST_BATCHES),
    ) -> BatchList:
        """List batches, newest first."""
        tenant = self._tenant(request)
        batches = []
        if self._store.used:
            batches = await self._store.ask(Database.batches, tenant, after, limit + 1)
        shown = batches[:limit]
        return BatchList(
            data=[BatchObject.of(batch) for batch in shown],
            first_id=shown[0].id if shown else None,
            last_id=shown[-1].id if shown else None,
            has_more=len(batches) > limit,
        )

    async def get_batch(self, request: Request, batch_id: str) -> BatchObject:
        """Describe a batch, and how far it has come."""
        tenant = self._tenant(request)
        self._check_used("batch")
        return BatchObject.of(await self._store.ask(Database.batch, batch_id, tenant))

    async def cancel_batch(self, request: Request, batch_id: str) -> BatchObject:
        """End a batch early; the results that there are become its files."""
        tenant = self._tenant(request)
        self._check_used("batch")
        now = int(self._unix_clock())
        batch = await self._store.ask(Database.cancel, batch_id, tenant, now)
        self._on_change()
        return BatchObject.of(batch)

    def _tenant(self, request: Request) -> str:
        return self._access.caller(request.headers).principal.tenant

    def _check_used(self, what: str) -> None:
        """Nothing is made on the disk for a question about what cannot be there."""
        if not self._store.used:
            raise NotFound(f"there is no such {what}", param=f"{what}_id")

    def _check_lines(self, content: BinaryIO) -> None:
        """Raises InvalidRequest that names the first bad line."""
        content.seek(0)
        _, faults = find_faults(content, self._config.max_body_bytes)
        if faults:
            raise _invalid(faults[0])


def _invalid(fault: Fault) -> InvalidRequest:
    place = "" if fault.line is None else f"line {fault.line}: "
    return InvalidRequest(f"{place}{fault.message}", param="file")
