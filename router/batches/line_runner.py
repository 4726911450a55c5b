"""Runs one line of a batch with the endpoint that answers the same body over HTTP.

So a line can use every feature of the endpoint. Its requests run in the background, for the key
that created the batch, and count under the class ``batch``. Like a request, a line counts against
the limits of that key, and waits until they allow it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.errors import (
    BatonError,
    Overloaded,
    RateLimitExceeded,
    Unavailable,
    WorkerFailed,
)
from baton.request import Principal
from baton.telemetry.logs import of_request
from router.access.access import Access
from router.access.api_keys import Caller
from router.batches.line import Line
from router.batches.slots import LineSlots
from router.batches.storage.batch import Batch, LineResult
from router.http.errors import error_object, internal_error
from router.inference.endpoint import Endpoint

MAX_FAILURES = 5
"""Maximum number of times that a request line is tried if workers fail while they run it."""
RETRY_S = 1.0
MAX_RETRY_S = 30.0


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """The HTTP status and body of the answer to one request line of a batch."""

    status: int
    request_id: str
    body: Mapping[str, Any]


class LineRunner:
    """Runs lines for the key that created their batch. Owned by the event loop."""

    def __init__(self, endpoints: Mapping[str, Endpoint], access: Access, slots: LineSlots) -> None:
        """Create a runner. Each line runs in one of ``slots``; ``endpoints`` holds the endpoint of
        each URL that a line may call."""
        self._endpoints = endpoints
        self._access = access
        self._slots = slots

    def has_key(self, batch: Batch) -> bool:
        """Return whether the API key that created a batch is still valid and allows inference."""
        return self._access.owner_of(Principal(batch.tenant, batch.key_id)) is not None

    async def run(self, batch: Batch, line: Line) -> LineResult:
        """Run a request line of a batch and return its result, however long it takes.

        Cancellation aborts the line on the workers. Raises BatchHeld if the line had not begun when
        its batch was put on hold.
        """
        return result_of(line, await self._answer(batch, line))

    async def _answer(self, batch: Batch, line: Line) -> LineAnswer:
        while True:
            owner = self._access.owner_of(Principal(batch.tenant, batch.key_id))
            if owner is None:
                # The batch ends within a second. Until then its lines wait.
                wait_s = MAX_RETRY_S
            else:
                try:
                    async with self._access.visiting(owner, background=True) as caller:
                        return await self._answer_of(caller, batch, line)
                except RateLimitExceeded as error:
                    wait_s = min(MAX_RETRY_S, error.retry_after or RETRY_S)
            await asyncio.sleep(wait_s)

    async def _answer_of(self, caller: Caller, batch: Batch, line: Line) -> LineAnswer:
        """Run a request line of a batch, after it was counted against the key's limits."""
        failures, wait_s = 0, RETRY_S
        while True:
            request_id = secrets.token_hex(16)
            try:
                # A waiting line holds no slot.
                async with self._slots.slot(batch):
                    with of_request(request_id=request_id):
                        body = await self._endpoints[line.url].run_line(line.body, caller)
                return LineAnswer(200, request_id, body)
            except BatonError as error:
                failures += isinstance(error, WorkerFailed)
                passing = isinstance(error, Overloaded | Unavailable)
                if not passing or failures >= MAX_FAILURES:
                    return LineAnswer(error.http_status, request_id, error_object(error))
                if not isinstance(error, RateLimitExceeded):
                    wait_s = min(MAX_RETRY_S, max(wait_s, error.retry_after or 0.0))
                    wait_s, pause_s = 2 * wait_s, wait_s
                else:
                    pause_s = min(MAX_RETRY_S, error.retry_after or RETRY_S)
            await asyncio.sleep(pause_s)


def result_of(line: Line, answer: LineAnswer) -> LineResult:
    """Convert the answer to a request line to its result, for the batch's output file or error
    file."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": answer.body,
    }
    usage = answer.body.get("usage") or {}
    # The Responses API has other names for these fields.
    prompt, completion = (
        ("input", "output") if "input_tokens" in usage else ("prompt", "completion")
    )
    details = usage.get(f"{prompt}_tokens_details") or {}
    return LineResult(
        line.number,
        answer.status < 400,
        record(line, response=response, error=None),
        prompt_tokens=usage.get(f"{prompt}_tokens", 0),
        cached_tokens=details.get("cached_tokens", 0),
        completion_tokens=usage.get(f"{completion}_tokens", 0),
    )


def failed_result(line: Line, error: Exception) -> LineResult:
    """Build the result of a request line that raised ``error``, which names only the type of an
    error that clients do not know."""
    told = error if isinstance(error, BatonError) else internal_error(error)
    answer = LineAnswer(told.http_status, secrets.token_hex(16), error_object(told))
    return result_of(line, answer)


def expired_result(line: Line) -> LineResult:
    """Build the result of a request line that has no answer when its batch's window ends."""
    error = {
        "code": "batch_expired",
        "message": "This request was not answered before the completion window ended.",
    }
    return LineResult(line.number, False, record(line, response=None, error=error))


def record(line: Line, *, response: dict[str, Any] | None, error: dict[str, str] | None) -> str:
    """Build the object that OpenAI's result files have for a line, as JSON."""
    return json.dumps(
        {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        },
        separators=(",", ":"),
    )
