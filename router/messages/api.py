"""``POST /v1/messages`` and its token count, in Anthropic's formats."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from baton.errors import InvalidRequest
from baton.grammar import Grammar, GrammarKind
from router.http.client import caller_of
from router.http.fields import validate
from router.inference.builder import Arrival
from router.inference.endpoint import ApiAnswer, Endpoint
from router.inference.reasoning import ReasoningInput, checked_effort, checked_thinking
from router.inference.sampling_input import SamplingInput
from router.inference.service import InferenceService
from router.messages.answer import MessagesAnswer
from router.messages.blocks import ending_of, message_turns
from router.messages.cache_control import retentions_of
from router.messages.protocol import CountTokensRequest, MessagesRequest
from router.messages.tools import message_tools


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
                body = validate(CountTokensRequest, raw, self._service.fields)
                self._builder.check_model(body.model)
                turns, tools = message_turns(body), message_tools(body)
                ids = await self._builder.encoder.chat_ids(
                    tenant,
                    turns,
                    tools,
                    ending=ending_of(turns),
                    variables=self._builder.variables(_thinking(body)),
                )
        return JSONResponse({"input_tokens": len(ids)})

    async def _parse(self, raw: dict[str, Any], arrival: Arrival) -> ApiAnswer:
        body = validate(MessagesRequest, raw, self._service.fields)
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
            self._builder.variables(_thinking(body)),
        )
        built = replace(built, retentions=kept)
        dialect = self._builder.dialect
        return MessagesAnswer(
            built,
            body.model,
            dialect,
            use,
            stream=bool(body.stream),
            max_tokens=body.max_tokens,
        )


def _thinking(body: CountTokensRequest) -> ReasoningInput:
    """Read the reasoning settings of a body: ``thinking``, and its effort. Raises
    InvalidRequest."""
    found = checked_thinking(body.thinking)
    effort = checked_effort((body.output_config or {}).get("effort"), "output_config.effort")
    if found.enabled is False:
        return found
    return replace(found, effort=effort, effort_switches=False)


def _reasoning(body: MessagesRequest) -> ReasoningInput:
    """Read the reasoning settings of a body that has ``max_tokens``. Raises InvalidRequest."""
    found = _thinking(body)
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
        is_cut_to_room=True,
        grammar=_grammar(body),
        grammar_param="output_config.format",
    )


def _grammar(body: MessagesRequest) -> Grammar | None:
    """Read the format of the answer. Raises InvalidRequest."""
    form = (body.output_config or {}).get("format") or body.output_format
    if not form:
        return None
    param = "output_config.format"
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise InvalidRequest(f"{param}.type must be json_schema", param=param)
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}.schema must be an object", param=param)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
