"""Endpoint: one path of an HTTP API. It answers a request body that arrives over HTTP or as a batch
request line.

body ─parse→ ApiAnswer (its requests are built) ─InferenceService.run→ deltas
     ─the ApiAnswer's shapes→ server-sent events, or one body"""

from __future__ import annotations

import abc
import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from baton.errors import BatonError
from router.access.api_keys import Caller
from router.core.request import Choice, GenerationRequest, OutputDelta, choices_for
from router.http.client import caller_of, unless_disconnected
from router.http.json_stream import JsonStream, without_items
from router.http.sse import EventStream, error_event
from router.inference.builder import Arrival
from router.inference.service import BACKGROUND_WAIT_S, InferenceService

_PRIORITY = b'"priority"'


class ApiAnswer(abc.ABC):
    """The answer to one API request, in the format of its API, either streamed or whole."""

    def __init__(
        self, requests: Sequence[GenerationRequest], *, stream: bool, at_once: int | None = None
    ) -> None:
        """Create the answer to ``requests``. ``at_once``: the maximum number of requests that run
        at a time; None means all."""
        self.requests = requests
        self.choices: list[Choice] = choices_for(requests)
        """The choices of the answer: those of the first prompt, then of the second, and so on."""
        self.stream = stream
        self.at_once = at_once

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the workers that answer; empty before the first delta."""
        return next((choice.fingerprint for choice in self.choices if choice.fingerprint), "")

    @abc.abstractmethod
    def events(self, prompt: int, delta: OutputDelta) -> bytes:
        """Add a delta of a prompt's answer to its choice. Return the delta's server-sent events;
        empty if it has nothing for the client."""

    @abc.abstractmethod
    def last_events(self) -> bytes:
        """Return the last events of a stream whose requests have not failed."""

    def failure(self, error: BatonError) -> bytes:
        """Return the last event of a stream whose requests have failed."""
        return error_event(error)

    @abc.abstractmethod
    def keep(self, prompt: int, delta: OutputDelta) -> None:
        """Add a delta of a prompt's answer to its choice, with its text, which ``whole`` returns
        later."""

    @abc.abstractmethod
    def whole(self) -> Mapping[str, Any]:
        """Return the response body of an answer that is not streamed. Long lists in the body are
        ``Items``."""


Parse = Callable[[dict[str, Any], Arrival], Awaitable[ApiAnswer]]
"""Function that checks a request body and returns an ``ApiAnswer``, which has the requests to run.
Raises BatonError."""


class Endpoint:
    """Answers the request bodies of one path. Owned by the router's event loop."""

    def __init__(self, service: InferenceService, prefix: str, parse: Parse) -> None:
        """Create an endpoint. ``prefix``: the beginning of the ids of its answers. ``parse``: the
        function that converts a request body."""
        self._service = service
        self._prefix = prefix
        self._parse = parse

    async def answer(self, request: Request) -> Response:
        """Answer an HTTP request, either streamed or whole. Raises BatonError."""
        service, received_at = self._service, time.monotonic()
        max_s = service.config.request_deadline_s
        caller = caller_of(request)
        try:
            with service.counting_refusals(caller):
                name = self._name()
                tenant = caller.principal.tenant
                async with service.bodies.object(request, tenant, self._check(caller)) as body:
                    arrival = Arrival.of(name, received_at, request.headers, max_s, caller)
                    labels = arrival.labels.or_of_body(body)
                    call_id: str = request.state.request_id
                    arrival = replace(arrival, labels=labels, call_id=call_id)
                    answer = await self._parse(body, arrival)
        except ClientDisconnect:
            service.count_abandoned(caller)
            raise
        if answer.stream:
            return EventStream(lambda events: self._stream(arrival, answer, events), answer.failure)
        return await unless_disconnected(request.receive, self._whole(arrival, answer))

    async def run_line(self, body: dict[str, Any], caller: Caller) -> Mapping[str, Any]:
        """Run a batch request line as a background request, and return its whole answer. Raises
        BatonError."""
        service = self._service
        arrival = Arrival(
            self._name(), time.monotonic(), BACKGROUND_WAIT_S, caller, background=True
        )
        with service.counting_refusals(caller):
            arrival = replace(arrival, labels=arrival.labels.or_of_body(body))
            answer = await self._parse(body, arrival)
        await self._keep_all(arrival, answer, None)
        return await asyncio.to_thread(lambda: without_items(answer.whole()))

    def _check(self, caller: Caller) -> Callable[[bytes], None]:
        def check(begin: bytes) -> None:
            # A priority of the request's own may push others out of the queue.
            if _PRIORITY not in begin:
                self._service.check_place(caller)

        return check

    def _name(self) -> str:
        return f"{self._prefix}{secrets.token_hex(16)}"

    async def _stream(self, arrival: Arrival, answer: ApiAnswer, events: EventStream) -> None:
        async def show(prompt: int, delta: OutputDelta) -> None:
            if shown := answer.events(prompt, delta):
                await events.write(shown, more=True)

        def pass_on(prompt: int, delta: OutputDelta) -> bool:
            if not events.has_room:
                return False
            if shown := answer.events(prompt, delta):
                events.write_now(shown)
            return True

        async def set_limits(headers: Mapping[str, str]) -> None:
            events.headers.update(headers)

        await self._service.run(
            arrival,
            answer.requests,
            answer.choices,
            show,
            relay=pass_on,
            on_admitted=set_limits,
            at_once=answer.at_once,
        )
        await events.write(answer.last_events(), more=False)

    async def _whole(self, arrival: Arrival, answer: ApiAnswer) -> Response:
        headers: dict[str, str] = {}
        await self._keep_all(arrival, answer, headers)
        return JsonStream(answer.whole(), headers)

    async def _keep_all(
        self, arrival: Arrival, answer: ApiAnswer, headers: dict[str, str] | None
    ) -> None:
        async def keep(prompt: int, delta: OutputDelta) -> None:
            answer.keep(prompt, delta)

        def keep_now(prompt: int, delta: OutputDelta) -> bool:
            answer.keep(prompt, delta)
            return True

        async def set_limits(found: Mapping[str, str]) -> None:
            if headers is not None:
                headers.update(found)

        await self._service.run(
            arrival,
            answer.requests,
            answer.choices,
            keep,
            relay=keep_now,
            on_admitted=set_limits,
            at_once=answer.at_once,
        )
