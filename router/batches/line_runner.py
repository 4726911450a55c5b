"""Runs one line of a batch by the handler that answers the same request over HTTP.

So whatever an endpoint can do, a line can ask for. The handlers belong to APIs of their own, made
by ``line_handlers``: what these pass on is marked as background work, runs for the key that
made the batch, and is counted under the class ``batch``. API keys' limits do not apply: batches run
in the slack.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

import pydantic_core
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from baton.config.cluster import Config
from baton.config.pools import ContextClass
from baton.errors import BatonError, Overloaded, Unavailable, WorkerFailed
from baton.request import Principal
from baton.telemetry.metrics import RouterMetrics
from router.access.access import Access
from router.access.api_keys import Caller
from router.batches.batch import Batch, LineResult
from router.batches.line import Line
from router.core.request import Dispatcher, GenerationRequest, OutputDelta
from router.core.request_recorder import RequestStats
from router.core.served_model import ServedModel
from router.embeddings.api import EmbeddingsApi
from router.http.errors import error_object
from router.inference.exchange import Exchange
from router.openai.api import OpenAiApi
from router.responses.api import ResponsesApi
from router.text.tokenizer import Tokenizer

Handler = Callable[[Request], Awaitable[Response]]

BATCH_CLASS = "batch"
"""Takes the place of the context-length class in the metrics of lines."""
MAX_WAIT_S = 31 * 86400.0
"""A line waits for its turn until its batch ends; no window is longer."""
MAX_FAILURES = 5
"""So often a line is tried whose workers fail."""
RETRY_S = 1.0
MAX_RETRY_S = 30.0
_TENANT_HEADER, _KEY_HEADER = "x-batch-tenant", "x-batch-key"


class _LineAccess(Access):
    """Who asks stands in headers of our own making: nobody else's requests come here."""

    def __init__(self, config: Config, metrics: RouterMetrics) -> None:
        super().__init__(config, metrics)
        self._keys_by_name = {key.name: key for key in config.keys}

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Never raises: the key was known when it made the batch."""
        name = headers[_KEY_HEADER]
        key = self._keys_by_name.get(name)
        return Caller(Principal(headers[_TENANT_HEADER], name), key)


class _BackgroundDispatcher:
    """Implements ``router.core.request.Dispatcher``: everything goes in the background."""

    def __init__(self, dispatcher: Dispatcher, deadline_s: float) -> None:
        self._dispatcher = dispatcher
        self._deadline_s = deadline_s

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        background = replace(request, background=True, deadline_s=self._deadline_s)
        generator = cast(AsyncGenerator[OutputDelta, None], self._dispatcher.generate(background))
        async with aclosing(generator) as deltas:
            async for delta in deltas:
                yield delta

    def health(self) -> tuple[str, str]:
        return self._dispatcher.health()

    def metrics_addresses(self) -> list[str]:
        return self._dispatcher.metrics_addresses()

    @property
    def context_length(self) -> int:
        return self._dispatcher.context_length


def line_handlers(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
) -> Mapping[str, Handler]:
    """The handlers for lines, by the url that a line asks."""
    patient = config.model_copy(
        update={
            "request_deadline_s": MAX_WAIT_S,
            "classes": (ContextClass(name=BATCH_CLASS, slo_ttft_s=MAX_WAIT_S),),
            "slo_tpot_s": MAX_WAIT_S,
        }
    )
    background = _BackgroundDispatcher(dispatcher, config.request_deadline_s)
    access = _LineAccess(config, stats.metrics)
    parts = (background, tokenizer, model, stats, patient, access)
    api, exchange = OpenAiApi(*parts), Exchange(*parts)
    return {
        "/v1/chat/completions": api.chat_completions,
        "/v1/completions": api.completions,
        "/v1/responses": ResponsesApi(exchange).create,
        "/v1/embeddings": EmbeddingsApi(exchange, model).create,
    }


@dataclass(frozen=True, slots=True)
class LineAnswer:
    """What a handler has answered."""

    status: int
    request_id: str
    body: dict[str, Any]


class LineRunner:
    """Owned by the event loop."""

    def __init__(self, handlers: Mapping[str, Handler]) -> None:
        """``handlers`` by the url of a line."""
        self._handlers = handlers

    async def run(self, batch: Batch, line: Line) -> LineResult:
        """The line's result, however long that takes; cancelling it aborts it on the workers."""
        return result_of(line, await self._answer(batch, line))

    async def _answer(self, batch: Batch, line: Line) -> LineAnswer:
        failures, wait_s = 0, RETRY_S
        while True:
            request_id = secrets.token_hex(16)
            try:
                response = await self._handlers[line.url](_request(batch, line, request_id))
                return LineAnswer(
                    response.status_code, request_id, json.loads(bytes(response.body))
                )
            except BatonError as error:
                failures += isinstance(error, WorkerFailed)
                passing = isinstance(error, Overloaded | Unavailable)
                if not passing or failures >= MAX_FAILURES:
                    return LineAnswer(error.http_status, request_id, error_object(error))
                wait_s = min(MAX_RETRY_S, max(wait_s, error.retry_after or 0.0))
            await asyncio.sleep(wait_s)
            wait_s *= 2


def result_of(line: Line, answer: LineAnswer) -> LineResult:
    """A line of the output file, or of that of errors."""
    response = {
        "status_code": answer.status,
        "request_id": answer.request_id,
        "body": answer.body,
    }
    usage = answer.body.get("usage") or {}
    # Responses have other names for them.
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


def expired_result(line: Line) -> LineResult:
    """Of a line whose batch's window has ended before it had another result."""
    error = {
        "code": "batch_expired",
        "message": "This request was not answered before the completion window ended.",
    }
    return LineResult(line.number, False, record(line, response=None, error=error))


def record(line: Line, *, response: dict[str, Any] | None, error: dict[str, str] | None) -> str:
    """OpenAI's object for a line, as JSON."""
    return json.dumps(
        {
            "id": f"batch_req_{secrets.token_hex(12)}",
            "custom_id": line.custom_id,
            "response": response,
            "error": error,
        },
        separators=(",", ":"),
    )


def _request(batch: Batch, line: Line, request_id: str) -> Request:
    body = pydantic_core.to_json(line.body)
    headers = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "x-request-id": request_id,
        _TENANT_HEADER: batch.tenant,
        _KEY_HEADER: batch.key_id,
    }
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": line.url,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        # There is no client who could hang up.
        await asyncio.Event().wait()
        raise AssertionError("an event that nobody sets")

    return Request(scope, receive)
