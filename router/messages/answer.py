"""Answers and errors in the shapes of ``/v1/messages``."""

from __future__ import annotations

import secrets
from typing import Any

from baton.errors import BatonError
from baton.request import FinishReason
from router.core.choice import Choice
from router.core.request import OutputDelta
from router.http.errors import anthropic_error
from router.inference.exchange import Event
from router.messages.output import MessageOutput
from router.tool_calls.formats import ToolFormat
from router.tool_calls.tools import ToolUse


class MessagesAnswer:
    """See ``router.inference.exchange.EventAnswer``."""

    def __init__(self, model_id: str, form: ToolFormat, use: ToolUse | None) -> None:
        self.id = f"msg_{secrets.token_hex(12)}"
        self._model_id = model_id
        self._output = MessageOutput(form, use)
        self._begun = False

    def events(self, delta: OutputDelta, choice: Choice) -> list[Event]:
        begin: list[Event] = []
        if not self._begun:
            self._begun = True
            usage = _usage(choice)
            message = {**self._message(), "content": [], "usage": usage}
            begin = [{"type": "message_start", "message": message}]
        return [*begin, *self._output.feed(delta.text, last=delta.finish_reason is not None)]

    def last_events(self, choice: Choice) -> list[Event]:
        delta = {
            "stop_reason": self._stop_reason(choice),
            "stop_sequence": choice.stop_string or None,
        }
        return [
            {"type": "message_delta", "delta": delta, "usage": _usage(choice)},
            {"type": "message_stop"},
        ]

    def failure(self, error: BatonError) -> list[Event]:
        return [anthropic_error(error)]

    def whole(self, choice: Choice) -> Event:
        self._output.feed(choice.text, last=True)
        return {
            **self._message(),
            "content": self._output.content,
            "stop_reason": self._stop_reason(choice),
            "stop_sequence": choice.stop_string or None,
            "usage": _usage(choice),
        }

    def _message(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model_id,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def _stop_reason(self, choice: Choice) -> str:
        if choice.finish_reason is FinishReason.LENGTH:
            return "max_tokens"
        if choice.stop_string:
            return "stop_sequence"
        return "tool_use" if self._output.has_calls else "end_turn"


def _usage(choice: Choice) -> dict[str, int]:
    """Tokens that were found in a cache are counted apart from the others."""
    return {
        "input_tokens": choice.prompt_tokens - choice.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": choice.cached_tokens,
        "output_tokens": choice.completion_tokens,
    }
