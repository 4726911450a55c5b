"""What is kept of a batch and of a file. Times are whole Unix seconds, as OpenAI has them.

States of a batch:

    validating ─the file is at fault→ failed
    validating → in_progress → finalizing → completed
    validating, in_progress ─cancel→ cancelling → cancelled
    validating, in_progress ─its window ends→ expired
    validating, in_progress ─its key is revoked, or the results find no room→ failed
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from router.batches.line import Fault


class BatchStatus(enum.StrEnum):
    """The values are OpenAI's."""

    VALIDATING = "validating"
    FAILED = "failed"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


UNFINISHED = (
    BatchStatus.VALIDATING,
    BatchStatus.IN_PROGRESS,
    BatchStatus.FINALIZING,
    BatchStatus.CANCELLING,
)
"""Somebody has to do something about these."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a tenant has uploaded, or a batch's results."""

    id: str
    tenant: str
    filename: str
    """The client's own; never a path."""
    purpose: str
    """``batch`` or ``batch_output``."""
    size: int
    """In bytes."""
    created_at: int
    expires_at: int
    """From then on it is gone."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch."""

    id: str
    tenant: str
    key_id: str
    """The public name of the API key that made it; empty for none."""
    model: str
    """The id of the model that answers: a cluster with another one leaves it alone."""
    endpoint: str
    input_file_id: str
    completion_window: str
    """As the client gave it."""
    created_at: int
    expires_at: int
    metadata: dict[str, str]
    status: BatchStatus = BatchStatus.VALIDATING
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    """Lines of its file."""
    completed: int = 0
    """Lines that were answered."""
    failed: int = 0
    """Lines that ended with an error."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: tuple[Fault, ...] = ()
    owner: str = ""
    """The process that runs it; empty for none."""
    beat: int = 0
    """Rises while the owner lives."""
    epoch: int = 0
    """Rises with each owner: what an earlier one still writes counts for nothing."""
    output_expires_s: int | None = None
    """How long its results are kept from their creation on, in seconds; None: the default."""
    result_bytes: int = 0
    """Size of the results that are not in its files yet."""

    @property
    def unfinished(self) -> bool:
        return self.status in UNFINISHED


@dataclass(frozen=True, slots=True)
class LineResult:
    """How a line has ended."""

    number: int
    ok: bool
    """It belongs into the output file, not into that of errors."""
    record: str
    """One line of JSON, without its end."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def size(self) -> int:
        """Bytes that it takes in its file."""
        return len(self.record.encode()) + 1
