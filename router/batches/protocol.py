"""OpenAI's formats of files and batches."""

from __future__ import annotations

import math
import re
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.errors import InvalidRequest
from router.batches.schedule.plan import BatchSchedule
from router.batches.storage.batch import Batch, StoredFile

MAX_METADATA = 16
MAX_METADATA_NAME = 64
MAX_METADATA_VALUE = 512
MAX_WINDOW_S = 30 * 86400
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])", re.ASCII)


class ExpiresAfter(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    anchor: Literal["created_at"]
    """Start of the time: `created_at`."""
    seconds: int
    """3600 (an hour) to 2592000 (30 days)."""


class CreateBatchRequest(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    input_file_id: Annotated[str, Field(max_length=128)]
    """The id of an uploaded file with the purpose `batch`."""
    endpoint: str
    """The endpoint of all lines of the file, such as `/v1/chat/completions`."""
    completion_window: str = "24h"
    """Time after which the batch ends with its results so far: a number and `s`, `m`, `h` or `d`,
    at most 30 days (extension: OpenAI only supports `24h`)."""
    metadata: dict[str, str] | None = None
    """At most 16 pairs, with names of up to 64 and values of up to 512 characters."""
    output_expires_after: ExpiresAfter | None = None
    """When the results are deleted. Default: 30 days after they are made."""


class FileObject(BaseModel):
    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"

    @classmethod
    def of(cls, file: StoredFile) -> FileObject:
        return cls(
            id=file.id,
            bytes=file.size,
            created_at=file.created_at,
            expires_at=file.expires_at,
            filename=file.filename,
            purpose=file.purpose,
        )


class FileList(BaseModel):
    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(BaseModel):
    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True


class BatchFault(BaseModel):
    code: str
    message: str
    param: str | None
    line: int | None


class BatchFaults(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchFault]


class RequestCounts(BaseModel):
    total: int
    completed: int
    failed: int


class InputTokensDetails(BaseModel):
    cached_tokens: int


class OutputTokensDetails(BaseModel):
    reasoning_tokens: int = 0


class BatchUsage(BaseModel):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ScheduleObject(BaseModel):
    """The plan for a batch in progress (extension)."""

    state: Literal["full_speed", "paced", "waiting"]
    """Outside of `batch_hours` a batch waits, or runs at the pace that its window requires."""
    starts_at: int | None
    """When a waiting batch continues."""
    estimated_end_at: int | None
    """Estimated end, at most the end of the window; null while the speed is not known."""
    late_lines: int
    """Estimated number of lines without an answer when the window ends."""
    message: str | None
    """Advice on late lines."""

    @classmethod
    def of(cls, schedule: BatchSchedule) -> ScheduleObject:
        late = schedule.late_lines
        return cls(
            state=schedule.state.value,
            starts_at=_whole(schedule.starts_at),
            estimated_end_at=_whole(schedule.ends_at),
            late_lines=late,
            message=f"The completion window is too short: about {late:,} lines will have no answer"
            " when it ends. Submit them again in a batch with a longer window."
            if late
            else None,
        )


class BatchObject(BaseModel):
    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str
    errors: BatchFaults | None
    input_file_id: str
    completion_window: str
    status: str
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    usage: BatchUsage
    metadata: dict[str, str] | None
    schedule: ScheduleObject | None
    """Null before the file is checked, and when the batch has ended."""

    @classmethod
    def of(cls, batch: Batch, schedule: BatchSchedule | None = None) -> BatchObject:
        faults = [
            BatchFault(code=f.code, message=f.message, param=f.param, line=f.line)
            for f in batch.faults
        ]
        same: dict[str, Any] = {
            name: getattr(batch, name) for name in cls.model_fields if hasattr(batch, name)
        }
        same |= {"status": batch.status.value, "metadata": batch.metadata or None}
        return cls(
            **same,
            errors=BatchFaults(data=faults) if faults else None,
            schedule=None if schedule is None else ScheduleObject.of(schedule),
            request_counts=RequestCounts(
                total=batch.total, completed=batch.completed, failed=batch.failed
            ),
            usage=BatchUsage(
                input_tokens=batch.prompt_tokens,
                input_tokens_details=InputTokensDetails(cached_tokens=batch.cached_tokens),
                output_tokens=batch.completion_tokens,
                output_tokens_details=OutputTokensDetails(),
                total_tokens=batch.prompt_tokens + batch.completion_tokens,
            ),
        )


class BatchList(BaseModel):
    object: Literal["list"] = "list"
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def _whole(at: float | None) -> int | None:
    return None if at is None else math.ceil(at)


def window_s(text: str) -> int:
    """Convert a completion window to seconds. Raises InvalidRequest."""
    match = _WINDOW.fullmatch(text)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise InvalidRequest(
            "completion_window must be a number and s, m, h or d, such as 24h, and at most 30d",
            param="completion_window",
        )
    return seconds


def check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """Check the size of metadata. Raises InvalidRequest."""
    fits = len(metadata) <= MAX_METADATA and all(
        len(name) <= MAX_METADATA_NAME and len(value) <= MAX_METADATA_VALUE
        for name, value in metadata.items()
    )
    if not fits:
        raise InvalidRequest(
            f"metadata has at most {MAX_METADATA} pairs, of at most {MAX_METADATA_NAME} and"
            f" {MAX_METADATA_VALUE} characters",
            param="metadata",
        )
    return metadata
