"""The records of a batch and of a file. Times are whole Unix seconds, as at OpenAI.

States of a batch:

    validating ─the file is at fault→ failed
    validating → in_progress → finalizing → completed
    validating, in_progress ─cancel→ ``cancelling`` → cancelled
    validating, in_progress ─its window ends→ expired
    validating, in_progress ─its key is revoked, or the results find no room→ failed
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class BatchStatus(enum.StrEnum):
    """The status of a batch, with OpenAI's values."""

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
"""Statuses of batches that a router process still has to work on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """An error in the input file of a batch."""

    code: str
    message: str
    """Description of the error. It repeats no prompt, so it is safe to show."""
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file that a tenant has uploaded, or the results of a batch."""

    id: str
    tenant: str
    filename: str
    """The client's name for the file; never used as a path."""
    purpose: str
    """What the file is for: ``batch`` is the input of a batch, ``batch_output`` its results."""
    size: int
    """Size of the file in bytes."""
    created_at: int
    expires_at: int
    """Time after which the file is not available any more."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The record of a batch."""

    id: str
    tenant: str
    key_id: str
    """Public name of the API key that created the batch; empty for none."""
    model: str
    """Id of the model that answers the batch. Clusters that serve another model ignore the
    batch."""
    endpoint: str
    input_file_id: str
    completion_window: str
    """The completion window as the client gave it, such as ``24h``."""
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
    """Number of lines of the batch's input file."""
    completed: int = 0
    """Number of the batch's lines that were answered."""
    failed: int = 0
    """Number of the batch's lines that ended with an error."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    faults: tuple[Fault, ...] = ()
    owner: str = ""
    """The process that runs the batch; empty for none."""
    beat: int = 0
    """Counter that increases while the owner is alive."""
    epoch: int = 0
    """Counter that increases with each new owner. Writes of earlier owners are rejected."""
    output_expires_s: int | None = None
    """Seconds for which the batch's results are kept after their creation; None: the default."""
    result_bytes: int = 0
    """Size of the results that are not in the batch's files yet, in bytes."""

    @property
    def unfinished(self) -> bool:
        return self.status in UNFINISHED


@dataclass(frozen=True, slots=True)
class LineResult:
    """The outcome of one request line of a batch, as stored in a result file."""

    number: int
    ok: bool
    """Whether the line's result goes to the output file; otherwise to the error file."""
    record: str
    """The result as one line of JSON, without the newline."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0

    @property
    def size(self) -> int:
        """Number of bytes that the result takes in its file."""
        return len(self.record.encode()) + 1
