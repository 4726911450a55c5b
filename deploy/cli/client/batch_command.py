"""`baton batch`: runs a file of requests over HTTP and saves the answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, ValidationError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from baton.client.http_api import api_errors
from baton.errors import BatonError, InvalidRequest, Unavailable
from baton.liveness.silence import SilenceWatch
from deploy.cli.options.exit_codes import ExitCode
from router.batches.line import BadLine, read_lines
from router.batches.protocol import BatchFault, BatchObject, FileObject
from router.batches.storage.batch import UNFINISHED

POLL_S = 0.5
AWAY_S = 120.0
"""Time without an answer from the router after which the command ends, in seconds. The batch keeps
running."""
_MAX_LINE_BYTES = 1 << 30
_COPY_BYTES = 1 << 20
T = TypeVar("T", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Paths of the files with a batch's results."""

    output: Path

    @property
    def errors(self) -> Path:
        """Path of the file that lists the batch request lines without an answer. It is next to the
        file of answers."""
        return self.output.with_name(f"{self.output.stem}.errors{self.output.suffix}")


class BatchCommand:
    """Runs one batch, from the upload of its file to the results. Raises BatonError and OSError."""

    def __init__(
        self,
        client: httpx.Client,
        say: Callable[[str], None],
        console: Console,
        *,
        poll_s: float = POLL_S,
        away_s: float = AWAY_S,
    ) -> None:
        """``client`` is an HTTP client that ``baton.client.http_api.open_api`` returns. ``say``
        prints a line for the user. The progress is drawn on ``console``."""
        self._client = client
        self._say = say
        self._console = console
        self._poll_s = poll_s
        self._away_s = away_s

    def begin(self, file: Path, window: str) -> BatchObject:
        """Upload a file of requests, and create a batch with them."""
        endpoint = endpoint_of(file)
        with file.open("rb") as content:
            form: dict[str, Any] = {
                "data": {"purpose": "batch"},
                "files": {"file": (file.name, content)},
            }
            uploaded = self._ask(FileObject, "POST", "/v1/files", **form)
        body = {
            "input_file_id": uploaded.id,
            "endpoint": endpoint,
            "completion_window": window,
        }
        batch = self._ask(BatchObject, "POST", "/v1/batches", json=body)
        self._say(
            f"batch {batch.id}: if this is interrupted, baton batch --id {batch.id} continues"
        )
        return batch

    def follow(self, batch_id: str) -> BatchObject:
        """Show the progress until the batch ends. The cluster may be unreachable for a while."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[failed]}"),
            TimeElapsedColumn(),
        )
        silence, answers, said = SilenceWatch[str](self._away_s), 0, False
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=None, failed="")
            while True:
                try:
                    batch = self._ask(BatchObject, "GET", f"/v1/batches/{batch_id}")
                    answers += 1
                except Unavailable:
                    if silence.tick({batch_id: answers}, time.monotonic()):
                        raise
                    progress.update(task, description="no answer; waiting")
                else:
                    counts = batch.request_counts
                    progress.update(
                        task,
                        description=_state(batch),
                        total=counts.total or None,
                        completed=counts.completed + counts.failed,
                        failed=f"{counts.failed} failed" if counts.failed else "",
                        refresh=True,
                    )
                    if batch.status not in UNFINISHED:
                        return batch
                    if not said and batch.schedule is not None and batch.schedule.message:
                        self._say(batch.schedule.message)
                        said = True
                time.sleep(self._poll_s)

    def finish(self, batch: BatchObject, files: BatchFiles) -> ExitCode:
        """Write the results to ``files``, and return the exit code.

        Raises InvalidRequest if the file was invalid.
        """
        if batch.status == "failed":
            faults = batch.errors.data if batch.errors else []
            raise InvalidRequest("; ".join(map(_shown, faults)) or "the batch failed")
        for file_id, path in (
            (batch.output_file_id, files.output),
            (batch.error_file_id, files.errors),
        ):
            if file_id is not None:
                self._download(file_id, path)
                self._say(f"{path}")
        counts = batch.request_counts
        self._say(f"{batch.status}: {counts.completed} of {counts.total} lines were answered")
        if batch.status == "completed" and not counts.failed:
            return ExitCode.OK
        return ExitCode.INCOMPLETE

    def _ask(self, kind: type[T], method: str, path: str, **content: Any) -> T:
        with api_errors():
            response = self._client.request(method, path, **content)
        try:
            return kind.model_validate_json(response.content)
        except ValidationError:
            raise BatonError(
                f"{response.url} did not answer like a Baton router of this version"
            ) from None

    def _download(self, file_id: str, path: Path) -> None:
        with (
            api_errors(),
            self._client.stream("GET", f"/v1/files/{file_id}/content") as response,
            path.open("wb") as file,
        ):
            for piece in response.iter_bytes(_COPY_BYTES):
                file.write(piece)


def _state(batch: BatchObject) -> str:
    schedule = batch.schedule
    if schedule is None or schedule.starts_at is None:
        return batch.status
    at = datetime.fromtimestamp(schedule.starts_at).astimezone()
    return f"waits for batch_hours until {at:%a %H:%M}"


def _shown(fault: BatchFault) -> str:
    return fault.message if fault.line is None else f"line {fault.line}: {fault.message}"


def endpoint_of(file: Path) -> str:
    """Return the API endpoint that the first request line of a batch file names. Raises
    InvalidRequest."""
    with file.open("rb") as raws:
        try:
            line = next(read_lines(raws, _MAX_LINE_BYTES), None)
        except BadLine as bad:
            raise InvalidRequest(f"line {bad.fault.line}: {bad.fault.message}") from None
    if line is None:
        raise InvalidRequest(f"{file} has no lines")
    return line.url


def run_batch(
    command: BatchCommand, file: Path | None, batch_id: str, window: str, output: Path | None
) -> ExitCode:
    """Start a batch with the requests in ``file``, or wait for the existing batch ``batch_id``.
    Return the exit code."""
    batch = command.begin(file, window) if file is not None else None
    name = batch.id if batch is not None else batch_id
    if output is None:
        output = Path(f"{name}.jsonl") if file is None else file.with_suffix(".results.jsonl")
    return command.finish(command.follow(name), BatchFiles(output))
