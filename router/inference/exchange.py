"""What the APIs beside OpenAI's older two have in common: from a body to an answer and its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response

from baton.config.cluster import Config
from baton.errors import BatonError
from baton.grammars.grammar_gate import GrammarGate
from router.access.access import Access
from router.access.api_keys import Caller
from router.core.choice import Choice, choices_for
from router.core.request import Dispatcher, GenerationRequest, OutputDelta
from router.core.request_recorder import RequestStats, count_refusal
from router.core.served_model import ServedModel
from router.http.body import read_object
from router.http.disconnect import unless_disconnected
from router.http.sse import EventStream, EventStreamResponse, encode_named
from router.inference.delivery import Delivery, Sink
from router.inference.request_builder import Arrival, RequestBuilder
from router.text.tokenizer import Tokenizer

Event = Mapping[str, Any]
"""Data of a server-sent event, which is named after its ``type``."""


class EventAnswer(Protocol):
    """One API's shapes, for one request with one prompt."""

    @property
    def id(self) -> str:
        """Unique; clients see it."""

    def events(self, delta: OutputDelta, choice: Choice) -> list[Event]:
        """What a delta has told; with the first one also what comes before everything.

        ``choice`` has counted the delta already.
        """

    def last_events(self, choice: Choice) -> list[Event]:
        """What comes when all deltas are told."""

    def failure(self, error: BatonError) -> list[Event]:
        """The end of an answer that has failed on its way."""

    def whole(self, choice: Choice) -> Event:
        """The body of an answer that is not streamed."""


class Exchange:
    """Runs requests for handlers. They raise BatonError; ``router.http.errors`` answers it."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        model: ServedModel,
        stats: RequestStats,
        config: Config,
        access: Access,
    ) -> None:
        grammars = GrammarGate(
            tokenizer.grammars, stats.metrics.grammar_compile_seconds.labels(role="router").observe
        )
        self.builder = RequestBuilder(dispatcher, tokenizer, model, config, grammars=grammars)
        self._access = access
        self._metrics = stats.metrics
        self._config = config
        self._delivery = Delivery(dispatcher, stats, config, show=tokenizer.decode)

    def caller(self, headers: Mapping[str, str]) -> Caller:
        """Raises Unauthenticated."""
        return self._access.caller(headers)

    async def read(self, request: Request) -> dict[str, Any]:
        """The body. Raises InvalidRequest, RequestTooLarge and ClientDisconnect."""
        return await read_object(
            request, self._config.max_body_bytes, self._config.request_deadline_s
        )

    def arrival(self, request: Request, caller: Caller, answer_id: str, at: float) -> Arrival:
        """Raises InvalidRequest."""
        max_s = self._config.request_deadline_s
        return Arrival.of(answer_id, at, request.headers, max_s, caller)

    @asynccontextmanager
    async def counting_refusals(self) -> AsyncIterator[None]:
        """What fails within has not become a request, and is counted."""
        try:
            yield
        except BatonError as error:
            count_refusal(self._metrics, error)
            raise
        except ClientDisconnect:
            count_refusal(self._metrics, None)
            raise

    async def respond(
        self,
        request: Request,
        answer: EventAnswer,
        built: GenerationRequest,
        arrival: Arrival,
        *,
        stream: bool,
    ) -> Response:
        """Generate and answer, in one piece or as it comes."""
        (choice,) = choices_for([built])
        if stream:

            async def work(events: EventStream) -> None:
                async def show(_: int, delta: OutputDelta) -> None:
                    choice.add(delta, keep_text=False)
                    some = answer.events(delta, choice)
                    if some:
                        await events.write(encode_named(some), more=True)

                async with self._access.entered(arrival.caller, [built], [choice]) as headers:
                    events.headers = headers
                    await self._delivery.deliver_all([built], arrival.at, show)
                    await events.write(encode_named(answer.last_events(choice)), more=False)

            return EventStreamResponse(work, lambda error: encode_named(answer.failure(error)))

        async def keep(_: int, delta: OutputDelta) -> None:
            choice.add(delta, keep_text=True)

        async def whole() -> Response:
            async with self._access.entered(arrival.caller, [built], [choice]) as headers:
                await self._delivery.deliver_all([built], arrival.at, keep)
                return JSONResponse(answer.whole(choice), headers=dict(headers))

        return await unless_disconnected(request.receive, whole())

    async def collect(
        self, built: Sequence[GenerationRequest], arrival: Arrival, sink: Sink, at_once: int
    ) -> Mapping[str, str]:
        """Run the prompts of one request, ``at_once`` at a time, and give ``sink`` what they bring.

        Returns what is left of the caller's allowance, as headers.
        """
        choices = choices_for(built)

        async def keep(place: int, delta: OutputDelta) -> None:
            choices[place].add(delta, keep_text=False)
            await sink(place, delta)

        async with self._access.entered(arrival.caller, built, choices) as headers:
            await self._delivery.deliver_all(built, arrival.at, keep, at_once)
            return headers
