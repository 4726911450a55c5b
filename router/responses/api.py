"""``POST /v1/responses``, without stored state."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from starlette.responses import Response

from baton.errors import InvalidRequest, UnsupportedParameter
from router.conversation.turns import Turn
from router.dialects.tools import ToolUse, use_of
from router.http.fields import note_ignored, validate
from router.inference.builder import Arrival
from router.inference.cache_fields import with_cache_fields
from router.inference.endpoint import ApiAnswer, Endpoint
from router.inference.reasoning import Effort, ReasoningInput, checked_effort
from router.inference.sampling_input import SamplingInput
from router.inference.service import InferenceService
from router.openai.api import sampling_of
from router.responses.answer import Repeated, ResponsesAnswer
from router.responses.items import response_turns
from router.responses.protocol import ResponsesRequest
from router.responses.text_format import format_grammar, text_format
from router.responses.tools import response_choice, response_tools

MAX_REPEATED_CHARACTERS = 128 << 10
"""Maximum size of a request field that the answer repeats, as JSON, in characters. A grammar's text
has the same maximum."""
_INCLUDED_ANYWAY = ("reasoning.encrypted_content",)
"""Values of ``include`` that are served as they are: reasoning is never encrypted. Others are
ignored: what they would add, such as log probabilities, is left out."""
_SUMMARIES = (None, "auto", "concise", "detailed")


class ResponsesApi:
    """The handler of ``POST /v1/responses``. Its endpoint converts errors to responses."""

    def __init__(self, service: InferenceService) -> None:
        self._builder = service.builder
        self._fields = service.fields
        self.endpoint = Endpoint(service, "resp_", self._parse)

    async def create(self, request: Request) -> Response:
        """Answer text or items."""
        return await self.endpoint.answer(request)

    async def _parse(self, raw: dict[str, Any], arrival: Arrival) -> ApiAnswer:
        body = validate(ResponsesRequest, raw, self._fields)
        self._builder.check_model(body.model)
        _refuse_unserved(raw)
        asked = _asked(body)
        built = await self._builder.chat(
            arrival,
            asked.turns,
            asked.sampling,
            body.priority,
            asked.use,
            reasoning=ReasoningInput(effort=asked.effort),
        )
        (built,) = with_cache_fields([built], body)
        dialect = self._builder.dialect
        return ResponsesAnswer(built, asked.repeated, dialect, asked.use, stream=bool(body.stream))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The body of a request, checked as far as possible without the model."""

    turns: Sequence[Turn]
    sampling: SamplingInput
    repeated: Repeated
    use: ToolUse | None
    effort: Effort | None


def _asked(body: ResponsesRequest) -> _Asked:
    """Check the body of a request. Raises InvalidRequest and UnsupportedParameter."""
    tools = response_tools(body.tools)
    choice = response_choice(body.tool_choice, tools, parallel=body.parallel_tool_calls)
    form = text_format(body.text)
    for value, param in (
        (body.metadata, "metadata"),
        (form, "text.format"),
        (body.tool_choice, "tool_choice"),
    ):
        _check_repeated(value, param)
    if body.max_output_tokens is not None and body.max_output_tokens < 1:
        raise InvalidRequest("max_output_tokens must be at least 1", param="max_output_tokens")
    sampling = dataclasses.replace(sampling_of(body, body.max_output_tokens), is_cut_to_room=True)
    effort = _effort(body.reasoning)
    grammar = format_grammar(form)
    if grammar is not None:
        sampling = dataclasses.replace(sampling, grammar=grammar, grammar_param="text.format")
    repeated = Repeated(
        body.model,
        body.instructions,
        body.metadata or {},
        body.max_output_tokens,
        tools,
        "auto" if body.tool_choice is None else body.tool_choice,
        body.parallel_tool_calls is not False,
        form,
        effort,
    )
    turns = response_turns(body.input, body.instructions)
    return _Asked(turns, sampling, repeated, use_of(tools, choice), effort)


def _effort(given: Mapping[str, Any] | None) -> Effort | None:
    """Read ``effort`` from the field ``reasoning``. A summary may be requested there, but is never
    generated."""
    given = given or {}
    for name in ("summary", "generate_summary"):
        if given.get(name) not in _SUMMARIES:
            raise InvalidRequest(
                f"reasoning.{name} must be auto, concise or detailed", param=f"reasoning.{name}"
            )
    return checked_effort(given.get("effort"), "reasoning.effort")


def _check_repeated(value: Any, param: str) -> None:
    """Check the size of a field that each event of the answer may repeat. Raises InvalidRequest."""
    if len(json.dumps(value)) > MAX_REPEATED_CHARACTERS:
        raise InvalidRequest(
            f"{param} has at most {MAX_REPEATED_CHARACTERS} characters as JSON", param=param
        )


def _refuse_unserved(raw: Mapping[str, Any]) -> None:
    if raw.get("previous_response_id") is not None:
        raise UnsupportedParameter(
            "previous_response_id: no response is stored; send the whole conversation as input",
            param="previous_response_id",
        )
    include = raw.get("include")
    if include is not None and not (
        isinstance(include, list) and all(isinstance(one, str) for one in include)
    ):
        raise InvalidRequest("include must be a list of strings", param="include")
    if any(one not in _INCLUDED_ANYWAY for one in include or ()):
        note_ignored("include")
