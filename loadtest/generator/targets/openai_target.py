"""Sends requests to a server with OpenAI's API over HTTP: streamed chats or completions."""

from __future__ import annotations

import asyncio
import json
from array import array
from typing import Any, Literal

from baton.security.tls import TlsFiles
from loadtest.generator.results.request_record import Outcome, RequestRecord
from loadtest.generator.targets.http_connection import HttpConnection, HttpPool, Origin
from loadtest.generator.targets.target import AskOptions, RunClock, Target
from loadtest.generator.workload.prompts import PlannedRequest

_DATA = b"data:"


class EventSplitter:
    """Splits a byte stream, which arrives in pieces, into server-sent events.

    The format: HTML standard, section 9.2. Names and ids of events are dropped, since no OpenAI
    server uses them.
    """

    def __init__(self) -> None:
        self._kept = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Add a piece of the stream. Return the data of the events that are now complete, in
        order."""
        *lines, self._kept = (self._kept + data).split(b"\n")
        # These servers send one line for an event; the empty line after it has no meaning.
        return [line[len(_DATA) :].strip() for line in lines if line.startswith(_DATA)]


Endpoint = Literal["chat", "completions"]

_PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")
_OK = 200
_REFUSALS = (429, 503)
_KEPT_BYTES = 4096
"""Maximum number of bytes to keep of an answer that is not a stream of events. Such an answer may
describe an error."""


class OpenAiTarget(Target[bytes]):
    """Sends requests to OpenAI's API. Requests are encoded ahead of time, and answers are read
    event by event.
    """

    def __init__(
        self,
        url: str,
        endpoint: Endpoint,
        options: AskOptions,
        api_key: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        """Raises ConfigError if the URL is invalid, or if files of ``tls`` cannot be used."""
        origin = Origin.parse(url)
        self._pool = HttpPool(origin, tls)
        self._endpoint: Endpoint = endpoint
        self._options = options
        key = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._head = (
            f"POST {origin.path}{_PATHS[endpoint]} HTTP/1.1\r\nhost: {origin.authority}\r\n"
            f"accept: text/event-stream\r\ncontent-type: application/json\r\n{key}content-length: "
        ).encode()

    def prepare(self, request: PlannedRequest) -> bytes:
        """Implement ``Target``."""
        fields: dict[str, Any] = {
            "model": self._options.model,
            "max_tokens": request.output_tokens,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.ignore_eos:
            fields["ignore_eos"] = True
        if self._endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            fields["prompt"] = request.prompt
        body = json.dumps(fields, separators=(",", ":")).encode()
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)

    async def ask(
        self, request: PlannedRequest, prepared: bytes, due_s: float, clock: RunClock
    ) -> RequestRecord:
        """Implement ``Target``.

        If no connection is idle, the time to open one counts as part of the request's time.
        """
        sent_s = clock.now()
        answer = StreamedAnswer()
        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(self._options.timeout_s):
                connection = await self._pool.take()
                connection.send(prepared, answer)
                await answer.ended
        except TimeoutError:
            answer.fail("aborted", "timeout")
        except OSError as error:
            answer.fail("error", type(error).__name__)
        finally:
            if connection is not None and not answer.ended.done():
                connection.close()
        return answer.record(request, due_s, sent_s, clock)

    async def close(self) -> None:
        """Implement ``Target``."""
        self._pool.close()


class StreamedAnswer:
    """Assembles the answer to one request; implements ``http_connection.HttpExchange``."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcome: Outcome = "ok"
        self._code = ""
        self._status = 0
        self._is_stream = False
        self._is_whole = False
        self._events = EventSplitter()
        self._kept = b""
        self._times: array[float] = array("d")
        self._usage: dict[str, Any] = {}

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Implement ``HttpExchange``."""
        self._status = status
        self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")

    def body(self, data: bytes, now: float) -> None:
        """Implement ``HttpExchange``."""
        if not self._is_stream:
            self._kept = (self._kept + data)[:_KEPT_BYTES]
            return
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self._is_whole = True
                continue
            try:
                self._take(json.loads(event), now)
            except (ValueError, AttributeError, TypeError):
                self.fail("error", "not_json")

    def _take(self, fields: dict[str, Any], now: float) -> None:
        if "error" in fields:
            self.fail("error", _error_code(fields) or "error")
        self._usage = fields.get("usage") or self._usage
        for choice in fields.get("choices") or ():
            part = choice.get("delta") or {}
            if choice.get("text") or any(part.get(name) for name in _TEXT_FIELDS):
                self._times.append(now)
            self._is_whole = self._is_whole or choice.get("finish_reason") is not None

    def end(self, fault: str) -> None:
        """Implement ``HttpExchange``."""
        if self._status and self._status != _OK:
            outcome: Outcome = "shed" if self._status in _REFUSALS else "error"
            self.fail(outcome, _error_code(self._body_fields()) or str(self._status))
        elif fault:
            self.fail("error", fault)
        elif not self._is_stream:
            self.fail("error", "no_stream")
        elif not self._is_whole:
            self.fail("error", "broken_stream")
        elif not self._times:
            self.fail("error", "no_tokens")
        if not self.ended.done():
            self.ended.set_result(None)

    def fail(self, outcome: Outcome, code: str) -> None:
        """Record that the request failed. After the first call, further calls have no effect."""
        if self._outcome == "ok":
            self._outcome, self._code = outcome, code

    def _body_fields(self) -> dict[str, Any]:
        try:
            fields = json.loads(self._kept)
        except ValueError:
            return {}
        return fields if isinstance(fields, dict) else {}

    def record(
        self, request: PlannedRequest, due_s: float, sent_s: float, clock: RunClock
    ) -> RequestRecord:
        """Return the record of the completed request."""
        details = self._usage.get("prompt_tokens_details") or {}
        return RequestRecord(
            number=request.number,
            due_s=due_s,
            sent_s=sent_s,
            ended_s=clock.now(),
            outcome=self._outcome,
            code=self._code,
            input_tokens=self._usage.get("prompt_tokens") or request.input_tokens,
            output_tokens=self._usage.get("completion_tokens") or len(self._times),
            cached_tokens=details.get("cached_tokens") or 0,
            token_times_s=array("d", (clock.since_start(time) for time in self._times)),
        )


def _error_code(fields: dict[str, Any]) -> str:
    """Return the code of OpenAI's error object; empty without one."""
    error = fields.get("error")
    code = error.get("code") or error.get("type") if isinstance(error, dict) else error
    return str(code)[:80] if code else ""
