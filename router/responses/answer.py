"""Answers in the format of ``/v1/responses``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.errors import BatonError
from baton.request import FinishReason
from router.core.request import Choice, GenerationRequest, OutputDelta
from router.dialects.dialect import Dialect
from router.dialects.tools import Tool, ToolUse
from router.http.sse import encode_named
from router.inference.endpoint import ApiAnswer
from router.responses.output import Fields, ResponseOutput

_OUR_FAULT = 500


@dataclass(frozen=True, slots=True)
class Repeated:
    """The fields of a ``/v1/responses`` request that its answer repeats."""

    model: str
    instructions: str | None
    metadata: Mapping[str, Any]
    max_output_tokens: int | None
    tools: Sequence[Tool]
    tool_choice: Any
    """``tool_choice`` as the client gave it."""
    parallel_tool_calls: bool
    text_format: Mapping[str, Any]
    effort: str | None
    """``reasoning.effort`` as the client gave it."""


class ResponsesAnswer(ApiAnswer):
    """An answer of ``/v1/responses``, with one prompt and one choice: see ``ApiAnswer``."""

    def __init__(
        self,
        request: GenerationRequest,
        repeated: Repeated,
        dialect: Dialect,
        use: ToolUse | None,
        *,
        stream: bool,
    ) -> None:
        super().__init__([request], stream=stream)
        self._id = request.request_id
        self._created = int(time.time())
        self._repeated = repeated
        self._sampling: Fields = {
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "max_output_tokens": repeated.max_output_tokens,
        }
        self._cache_key = request.cache_key or None
        self._numbers = itertools.count()
        self._output = ResponseOutput(dialect, use, request.begins_in)

    def events(self, prompt: int, delta: OutputDelta) -> bytes:
        """Count a prompt's delta. Return its server-sent events; empty if the client sees nothing
        of it. See ``ApiAnswer``."""
        (choice,) = self.choices
        events: list[Fields] = []
        is_first = not choice.begun
        choice.add(delta, keep_text=False)
        if is_first:
            response = self._response("in_progress")
            events = [
                {"type": "response.created", "response": response},
                {"type": "response.in_progress", "response": response},
            ]
        last = delta.finish_reason is not None
        cut = delta.finish_reason is FinishReason.LENGTH
        return self._numbered([*events, *self._output.feed(delta.text, last=last, cut=cut)])

    def last_events(self) -> bytes:
        """Return the last events of a stream whose requests have not failed. See ``ApiAnswer``."""
        whole = self._final(self.choices[0])
        return self._numbered([{"type": f"response.{whole['status']}", "response": whole}])

    def failure(self, error: BatonError) -> bytes:
        """Return the last event of a stream whose requests have failed. See ``ApiAnswer``."""
        code = "server_error"
        if error.http_status < _OUR_FAULT:
            code = "rate_limit_exceeded" if error.http_status == 429 else "invalid_prompt"
        failed = {
            **self._response("failed"),
            "error": {"code": code, "message": error.message},
            "output": self._output.items,
        }
        return self._numbered([{"type": "response.failed", "response": failed}])

    def keep(self, prompt: int, delta: OutputDelta) -> None:
        """Count a prompt's delta, and store it for ``whole``. See ``ApiAnswer``."""
        self.choices[0].add(delta, keep_text=True)

    def whole(self) -> Fields:
        """Return the body of an answer that is not streamed. Long lists in it are ``Items``. See
        ``ApiAnswer``."""
        (choice,) = self.choices
        cut = choice.finish_reason is FinishReason.LENGTH
        self._output.feed(choice.text, last=True, cut=cut)
        return self._final(choice)

    def _final(self, choice: Choice) -> Fields:
        cut = choice.finish_reason is FinishReason.LENGTH
        return {
            **self._response("incomplete" if cut else "completed"),
            "completed_at": None if cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": _usage(choice),
        }

    def _response(self, status: str) -> Fields:
        repeated = self._repeated
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "instructions": repeated.instructions,
            "max_tool_calls": None,
            "metadata": dict(repeated.metadata),
            "model": repeated.model,
            "output": [],
            "parallel_tool_calls": repeated.parallel_tool_calls,
            "previous_response_id": None,
            "prompt_cache_key": self._cache_key,
            "reasoning": {"effort": repeated.effort, "summary": None},
            "safety_identifier": None,
            "service_tier": "default",
            "store": False,
            "system_fingerprint": self.fingerprint or None,
            "text": {"format": repeated.text_format, "verbosity": "medium"},
            "tool_choice": repeated.tool_choice,
            "tools": [_tool(tool) for tool in repeated.tools],
            "top_logprobs": 0,
            "truncation": "disabled",
            "usage": None,
            "user": None,
            **self._sampling,
        }

    def _numbered(self, events: list[Fields]) -> bytes:
        numbered = ({**event, "sequence_number": next(self._numbers)} for event in events)
        return encode_named(numbered)


def _tool(tool: Tool) -> Fields:
    if tool.is_custom:
        return {"type": "custom", "name": tool.name, "description": tool.description}
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": dict(tool.parameters),
        "strict": tool.strict,
    }


def _usage(choice: Choice) -> dict[str, Any]:
    return {
        "input_tokens": choice.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": choice.cached_tokens,
            "cache_write_tokens": choice.written_tokens,
        },
        "output_tokens": choice.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
        "total_tokens": choice.prompt_tokens + choice.completion_tokens,
    }
