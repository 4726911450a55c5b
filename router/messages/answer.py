"""Answers and errors in the format of ``/v1/messages``."""

from __future__ import annotations

from typing import Any

from baton.errors import BatonError
from baton.request import FinishReason
from router.core.request import Choice, GenerationRequest, OutputDelta
from router.dialects.dialect import Dialect
from router.dialects.tools import ToolUse
from router.http.errors import anthropic_error
from router.http.sse import encode_named
from router.inference.endpoint import ApiAnswer
from router.messages.cache_control import written_by_ttl
from router.messages.output import MessageOutput


class MessagesAnswer(ApiAnswer):
    """An answer of ``/v1/messages``, with one prompt and one choice: see ``ApiAnswer``."""

    def __init__(
        self,
        request: GenerationRequest,
        model_id: str,
        dialect: Dialect,
        use: ToolUse | None,
        *,
        stream: bool,
        max_tokens: int,
    ) -> None:
        """Create an answer. ``max_tokens`` is what the client gave; the request may have less."""
        super().__init__([request], stream=stream)
        self._id = request.request_id
        self._model_id = model_id
        self._is_cut_to_room = request.sampling.max_tokens < max_tokens
        self._output = MessageOutput(dialect, use, request.begins_in)

    def events(self, prompt: int, delta: OutputDelta) -> bytes:
        """Count a prompt's delta. Return its server-sent events; empty if the client sees nothing
        of it. See ``ApiAnswer``."""
        (choice,) = self.choices
        is_first = not choice.begun
        choice.add(delta, keep_text=False)
        events: list[dict[str, Any]] = []
        if is_first:
            message = {**self._message(), "content": [], "usage": self._usage(choice)}
            events = [{"type": "message_start", "message": message}]
        events += self._output.feed(delta.text, last=delta.finish_reason is not None)
        return encode_named(events)

    def last_events(self) -> bytes:
        """Return the last events of a stream whose requests have not failed. See ``ApiAnswer``."""
        (choice,) = self.choices
        delta = {
            "stop_reason": self._stop_reason(choice),
            "stop_sequence": choice.stop_string or None,
        }
        return encode_named(
            [
                {"type": "message_delta", "delta": delta, "usage": self._usage(choice)},
                {"type": "message_stop"},
            ]
        )

    def failure(self, error: BatonError) -> bytes:
        """Return the last event of a stream whose requests have failed. See ``ApiAnswer``."""
        return encode_named([anthropic_error(error)])

    def keep(self, prompt: int, delta: OutputDelta) -> None:
        """Count a prompt's delta, and store it for ``whole``. See ``ApiAnswer``."""
        self.choices[0].add(delta, keep_text=True)

    def whole(self) -> dict[str, Any]:
        """Return the body of an answer that is not streamed. Long lists in it are ``Items``. See
        ``ApiAnswer``."""
        (choice,) = self.choices
        self._output.feed(choice.text, last=True)
        return {
            **self._message(),
            "content": self._output.content,
            "stop_reason": self._stop_reason(choice),
            "stop_sequence": choice.stop_string or None,
            "usage": self._usage(choice),
        }

    def _message(self) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model_id,
            "stop_reason": None,
            "stop_sequence": None,
            "system_fingerprint": self.fingerprint or None,
        }

    def _stop_reason(self, choice: Choice) -> str:
        if choice.finish_reason is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._is_cut_to_room else "max_tokens"
        if choice.stop_string:
            return "stop_sequence"
        return "tool_use" if self._output.has_calls else "end_turn"

    def _usage(self, choice: Choice) -> dict[str, Any]:
        """Return Anthropic's ``usage`` of a choice. Tokens that were read from a cache and tokens
        that were written to a cache are counted separately."""
        cached, written = choice.cached_tokens, choice.written_tokens
        (request,) = self.requests
        return {
            "input_tokens": choice.prompt_tokens - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "cache_creation": written_by_ttl(request.retentions, cached, written),
            "output_tokens": choice.completion_tokens,
        }
