"""What keeps the state of files and batches: their records, their progress, and their owners.

``SqliteDatabase`` keeps it in a file that the router processes of one host share. ``RedisDatabase``
keeps it in Redis, for routers on several hosts. Each change is atomic, and durable before it is
answered, as far as its server promises that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from router.batches.schedule.plan import BatchWork
from router.batches.schedule.throughput import Progress
from router.batches.storage.batch import Batch, LineResult, StoredFile
from router.batches.storage.quota import Quota

MAX_UNFINISHED_OF_TENANT = 100
"""Maximum number of unfinished batches of a tenant."""
MAX_ENDED_OF_TENANT = 1000
"""Maximum number of ended batches that are kept per tenant; the oldest are deleted first."""
MAX_PLANNED = 1024
"""Maximum number of batches planned at a time. Batches whose windows end first are chosen."""
BUSY_RETRY_S = 60.0
"""Seconds after which a tenant with too many unfinished batches may try again."""


class LeaseLost(Exception):
    """Raised because another process runs the batch now."""


class StatusChanged(Exception):
    """Raised because the batch's status has changed, for example by a cancellation."""


class NoSpace(Exception):
    """Raised because the tenant's quota has no room for a result of its batch."""


@dataclass(frozen=True, slots=True)
class Free:
    """Selects the unfinished batches that a process may claim."""

    owners: Collection[str]
    """Owners whose batches may be claimed: this process, dead processes, and "" for batches without
    an owner."""
    but: Collection[str] = ()
    """Ids of batches that are not selected."""


class Database(Protocol):
    """The state of files and batches. Methods block."""

    def close(self) -> None:
        """Close the connection."""

    def identity(self) -> str:
        """Return the random id of this state, which changes if the state is lost; empty if the
        state is kept with the contents."""
        ...

    # Files

    def reserve(self, upload_id: str, tenant: str, size: int, ahead: int, quota: Quota) -> int:
        """Reserve room so that an upload has ``size`` bytes in all, and up to ``ahead`` more if
        there is ample room. Return the number of reserved bytes. Raises RequestTooLarge."""
        ...

    def release_uploads(self, ids: Sequence[str]) -> None:
        """Free the storage room that was reserved for uploads that ended without a file."""

    def uploads(self) -> dict[str, int]:
        """Return the reserved bytes of each upload, by its id, of all tenants and processes."""
        ...

    def add_file(self, file: StoredFile, upload_id: str, quota: Quota) -> None:
        """Turn an upload into a file. Raises RequestTooLarge if its reservation was released, and
        the quota has no room for it any more."""

    def file(self, file_id: str, tenant: str, now: int = 0) -> StoredFile:
        """Return a file that has not expired by ``now``. Raises NotFound."""
        ...

    def files(
        self, tenant: str, purpose: str, after: str, limit: int, *, ascending: bool, now: int = 0
    ) -> list[StoredFile]:
        """Return a page of a tenant's files: those that follow the file with the id ``after``, and
        have the purpose ``purpose`` ("" for any).

        Files that have expired by ``now`` are not included.
        """
        ...

    def delete_file(self, file_id: str, tenant: str) -> None:
        """Delete a file. Raises NotFound, and InvalidRequest while a batch needs it."""

    def collect(self, now: int) -> list[str]:
        """Delete expired files that no batch needs; return their ids."""
        ...

    def content_ids(self) -> set[str]:
        """Return the ids of files of all tenants, and of batches with results, whose contents are
        kept."""
        ...

    # Batches

    def add_batch(self, batch: Batch) -> None:
        """Add a batch. If the tenant then has too many ended batches, delete its oldest ended ones.

        Raises NotFound if the batch's input file does not exist, InvalidRequest if that file is not
        an input file, and Overloaded if the tenant has too many unfinished batches.
        """

    def batch(self, batch_id: str, tenant: str | None = None) -> Batch:
        """Return a batch. If ``tenant`` is given, the batch must belong to that tenant. Raises
        NotFound."""
        ...

    def batches(self, tenant: str, after: str, limit: int) -> list[Batch]:
        """Return a tenant's batches that follow the batch with the id ``after``, newest first."""
        ...

    def of_ids(self, batch_ids: Collection[str]) -> list[Batch]:
        """Return the batches with these ids, of any tenant, oldest first. Ids of deleted batches
        are ignored."""
        ...

    def beats(self) -> dict[str, int]:
        """Return the beat of each owner of unfinished batches: a number that changes while the
        owner lives."""
        ...

    def to_be_ended(self, free: Free, now: int, limit: int) -> list[Batch]:
        """Return batches that only need to be ended, oldest first: their lines have run, they were
        cancelled, or their window is over."""
        ...

    def to_be_run(self, free: Free, model: str, *, of_tenant: int, limit: int) -> list[Batch]:
        """Return up to ``limit`` batches of a model that this process may run. The first batch of
        each tenant comes before the second one of any tenant, and so on.

        A tenant has at most ``of_tenant`` batches in the list: those whose windows end first.
        """
        ...

    # Planning

    def works(self, model: str) -> list[BatchWork]:
        """Return the remaining work of a model's batches in progress."""
        ...

    def progress(self, model: str) -> Progress:
        """Return the progress of all batches of a model so far, and their speed."""
        ...

    def learn_speed(self, model: str, tokens_per_s: float) -> None:
        """Store the measured speed of a model's batches."""

    def cancel(self, batch_id: str, tenant: str, now: int) -> Batch:
        """Request that a batch is cancelled. Raises NotFound, and InvalidRequest if it has
        ended."""
        ...

    # Methods for the owner of a batch

    def claim(self, batch: Batch, owner: str) -> Batch | None:
        """Make ``owner`` the owner of a batch, and return the changed batch. Return None if the
        batch has ended, or if its owner has changed since ``batch`` was read."""
        ...

    def beat(self, owner: str) -> None:
        """Renew the lease of all batches of ``owner``."""

    def release(self, owner: str) -> None:
        """Release all batches of ``owner``, so that other processes need not wait until the owner's
        lease ends."""

    def move(self, held: Batch, /, **changes: Any) -> Batch:
        """Change fields of a batch if its status is still that of ``held``, the caller's copy.
        Raises LeaseLost, StatusChanged."""
        ...

    def done_lines(self, batch_id: str) -> set[int]:
        """Return the line numbers of a batch that have a result."""
        ...

    def add_results(self, held: Batch, results: Sequence[LineResult], quota: Quota) -> None:
        """Store results; a line's first result is kept. Raises LeaseLost and NoSpace."""

    def records(self, batch_id: str, *, ok: bool) -> Iterable[str]:
        """Yield the records of a batch's successful (``ok``) or failed results, in the order of
        their lines."""
        ...

    def finish(self, held: Batch, files: Sequence[StoredFile], **changes: Any) -> Batch:
        """End a batch whose results have become ``files``. Raises LeaseLost."""
        ...
