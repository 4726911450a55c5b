"""The operations of tenants on files and batches, for every API."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from baton.config.cluster import Config
from baton.errors import InvalidRequest, NotFound
from baton.request import Principal
from router.batches.line import ENDPOINTS, find_faults
from router.batches.protocol import check_metadata, window_s
from router.batches.storage.batch import Batch, Fault, StoredFile
from router.batches.storage.database import Database
from router.batches.storage.store import KEPT_S, BatchStore, Incoming

MAX_FILES = 10_000
MAX_BATCHES = 100
"""Maximum number of entries in one page of a list, as at OpenAI."""
DEFAULT_BATCHES = 20
MIN_EXPIRY_S, MAX_EXPIRY_S = 3600, KEPT_S
"""Bounds of the time for which a file is kept, in seconds, as at OpenAI."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """One page of a list."""

    entries: Sequence[T]
    has_more: bool


@dataclass(frozen=True, slots=True)
class Content:
    """Contents of a file that are in a bucket."""

    size: int
    pieces: AsyncIterator[bytes]


class BatchService:
    """Checks tenants' requests about files and batches, and applies them to the store. Raises
    BatonError. Owned by the event loop."""

    def __init__(
        self,
        store: BatchStore,
        model: str,
        config: Config,
        on_change: Callable[[], None],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a service; ``model`` is the served model's id. ``on_change`` is called when a
        batch was created or cancelled."""
        self._store = store
        self._model = model
        self._max_line_bytes = config.max_body_bytes
        self._on_change = on_change
        self._checking = asyncio.Semaphore(1)
        self._unix_clock = unix_clock

    # Files

    def incoming(self, tenant: str) -> AbstractAsyncContextManager[Incoming]:
        """Receive a new file of a tenant. It is removed at the end of the context, unless it is
        kept. See ``BatchStore.incoming``."""
        return self._store.incoming(tenant)

    async def add_file(
        self, incoming: Incoming, filename: str, expires_s: int | None
    ) -> StoredFile:
        """Store an uploaded batch input, and check each of its lines.

        Raises InvalidRequest that names the first bad line, and RequestTooLarge.
        """
        check_expiry(expires_s, "expires_after")
        await incoming.flush()
        # Check one file at a time: parsing JSON holds the interpreter lock.
        async with self._checking:
            await asyncio.to_thread(self._check_lines, incoming.path)
        return await incoming.keep(filename, "batch", expires_s)

    async def files(
        self, tenant: str, purpose: str, after: str, limit: int, *, ascending: bool
    ) -> Page[StoredFile]:
        """Return a tenant's files that follow the file with the id ``after``; ``purpose`` "" is
        any. Raises InvalidRequest."""
        _check_limit(limit, MAX_FILES)
        if not self._store.used:
            return Page((), has_more=False)
        found = await self._store.ask(
            Database.files,
            tenant,
            purpose,
            after,
            limit + 1,
            ascending=ascending,
            now=self._now(),
        )
        return Page(found[:limit], len(found) > limit)

    async def file(self, tenant: str, file_id: str) -> StoredFile:
        """Return a file. Raises NotFound."""
        self._check_used("file")
        return await self._store.ask(Database.file, file_id, tenant, self._now())

    async def content(self, tenant: str, file_id: str) -> Path | Content:
        """Return the path of a file's contents, or the contents if no folder has them. Raises
        NotFound."""
        file = await self.file(tenant, file_id)
        path = self._store.path(file)
        try:
            if path is None:
                return Content(file.size, await self._store.pieces(file))
            if path.exists():
                return path
        except FileNotFoundError:
            pass
        raise NotFound("the file's contents are gone", param="file_id")

    async def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises NotFound, and InvalidRequest while a batch needs it."""
        self._check_used("file")
        await self._store.delete_file(file_id, tenant)

    # Batches

    async def create_batch(
        self,
        principal: Principal,
        input_file_id: str,
        endpoint: str,
        window: str,
        metadata: Mapping[str, str],
        output_expires_s: int | None,
    ) -> Batch:
        """Start a batch. Raises InvalidRequest and NotFound."""
        if endpoint not in ENDPOINTS:
            raise InvalidRequest(
                f"endpoint must be one of {', '.join(ENDPOINTS)}", param="endpoint"
            )
        check_expiry(output_expires_s, "output_expires_after")
        self._check_used("file")
        now = self._now()
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            tenant=principal.tenant,
            key_id=principal.key_id,
            model=self._model,
            endpoint=endpoint,
            input_file_id=input_file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + window_s(window),
            metadata=check_metadata(dict(metadata)),
            output_expires_s=output_expires_s,
        )
        await self._store.ask(Database.add_batch, batch)
        self._on_change()
        return batch

    async def batches(self, tenant: str, after: str, limit: int) -> Page[Batch]:
        """Return a tenant's batches that follow the batch with the id ``after``, newest first.
        Raises InvalidRequest."""
        _check_limit(limit, MAX_BATCHES)
        if not self._store.used:
            return Page((), has_more=False)
        found = await self._store.ask(Database.batches, tenant, after, limit + 1)
        return Page(found[:limit], len(found) > limit)

    async def batch(self, tenant: str, batch_id: str) -> Batch:
        """Return a batch. Raises NotFound."""
        self._check_used("batch")
        return await self._store.ask(Database.batch, batch_id, tenant)

    async def cancel(self, tenant: str, batch_id: str) -> Batch:
        """End a batch early. Its results so far become its files.

        Raises NotFound, and InvalidRequest if it has ended.
        """
        self._check_used("batch")
        batch = await self._store.ask(Database.cancel, batch_id, tenant, self._now())
        self._on_change()
        return batch

    def _now(self) -> int:
        return int(self._unix_clock())

    def _check_used(self, what: str) -> None:
        """Raise NotFound if nothing was ever stored, so that a query creates no files on disk."""
        if not self._store.used:
            raise NotFound(f"there is no such {what}", param=f"{what}_id")

    def _check_lines(self, path: Path) -> None:
        """Check all lines of a file. Raises InvalidRequest that names the first bad line."""
        with path.open("rb") as file:
            _, faults = find_faults(file, self._max_line_bytes)
        if faults:
            raise _invalid(faults[0])


def check_expiry(seconds: int | None, param: str) -> None:
    """Check the time for which a file is kept. Raises InvalidRequest."""
    if seconds is not None and not MIN_EXPIRY_S <= seconds <= MAX_EXPIRY_S:
        raise InvalidRequest(
            f"{param} must be between {MIN_EXPIRY_S} and {MAX_EXPIRY_S} seconds",
            param=param,
        )


def _check_limit(limit: int, most: int) -> None:
    if not 1 <= limit <= most:
        raise InvalidRequest(f"limit must be between 1 and {most}", param="limit")


def _invalid(fault: Fault) -> InvalidRequest:
    place = "" if fault.line is None else f"line {fault.line}: "
    return InvalidRequest(f"{place}{fault.message}", param="file")
