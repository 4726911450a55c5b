"""``POST /v1/messages`` and its token count, in Anthropic's formats."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from baton.errors import InvalidRequest
from router.http.client import caller_of, validate
from router.inference.builder import Arrival
from router.inference.endpoint import ApiAnswer, Endpoint
from router.inference.reasoning import ReasoningInput, checked_thinking
from router.inference.sampling_input import SamplingInput
from router.inference.service import InferenceService
from router.messages.answer import MessagesAnswer
from router.messages.blocks import ending_of, message_tools, message_turns
from router.messages.cache_control import retentions_of
from router.messages.protocol import CountTokensRequest, MessagesRequest


class MessagesApi:
    """The handlers of ``/v1/messages`` and its token count. They raise BatonError, which
    ``router.http.errors`` converts to a response."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._builder = service.builder
        self.endpoint = Endpoint(service, "msg_", self._parse)

    async def create(self, request: Request) -> Response:
        """Continue a conversation."""
        return await self.endpoint.answer(request)

    async def count_tokens(self, request: Request) -> Response:
        """Count the tokens of a conversation as a prompt."""
        caller = caller_of(request)
        tenant = caller.principal.tenant
        with self._service.counting_refusals(caller):
            async with self._service.bodies.object(request, tenant) as raw:
                body = validate(CountTokensRequest, raw)
                self._builder.check_model(body.model)
                turns, tools = message_turns(body), message_tools(body)
                ids = await self._builder.encoder.chat_ids(
                    tenant,
                    turns,
                    tools,
                    ending=ending_of(turns),
                    variables=self._builder.variables(checked_thinking(body.thinking)),
                )
        return JSONResponse({"input_tokens": len(ids)})

    async def _parse(self, raw: dict[str, Any], arrival: Arrival) -> ApiAnswer:
        body = validate(MessagesRequest, raw)
        self._builder.check_model(body.model)
        use = message_tools(body)
        turns = message_turns(body)
        built = await self._builder.chat(
            arrival,
            turns,
            _sampling(body),
            body.priority,
            use,
            ending=ending_of(turns),
            reasoning=_reasoning(body),
        )
        kept = await retentions_of(
            body,
            built.prompt_ids,
            self._builder.encoder,
            arrival.tenant,
            use,
            self._builder.variables(checked_thinking(body.thinking)),
        )
        built = replace(built, retentions=kept)
        dialect = self._builder.dialect
        return MessagesAnswer(built, body.model, dialect, use, stream=bool(body.stream))


def _reasoning(body: MessagesRequest) -> ReasoningInput:
    """Read the reasoning settings of a body, its field ``thinking``. Raises InvalidRequest."""
    found = checked_thinking(body.thinking)
    if found.budget is not None and found.budget >= body.max_tokens:
        raise InvalidRequest(
            f"{found.budget_param} must be less than max_tokens, which counts the thinking too",
            param=found.budget_param,
        )
    return found


def _sampling(body: MessagesRequest) -> SamplingInput:
    return SamplingInput(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        seed=body.seed,
        stop=tuple(body.stop_sequences or ()),
        max_tokens=body.max_tokens,
    )
