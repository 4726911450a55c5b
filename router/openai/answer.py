"""Answers in the shapes of the two OpenAI endpoints, whole or in chunks."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from pydantic import BaseModel

from baton.request import FinishReason
from router.core.choice import Choice
from router.core.request import OutputDelta
from router.http.sse import to_json
from router.openai import protocol as openai_protocol
from router.openai.answer_details import NOTHING, AnswerDetails, ChunkExtras


def usage_of(choices: Sequence[Choice]) -> openai_protocol.Usage:
    """The sum over all prompts of a request."""
    prompt = sum(choice.prompt_tokens for choice in choices)
    completion = sum(choice.completion_tokens for choice in choices)
    cached = sum(choice.cached_tokens for choice in choices)
    return openai_protocol.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=openai_protocol.PromptTokensDetails(cached_tokens=cached),
    )


class Answer(Protocol):
    """One endpoint's shapes, for one request."""

    @property
    def id(self) -> str:
        """Unique; clients see it."""

    details: AnswerDetails | None
    usage_so_far: Sequence[Choice] | None

    def chunks(self, index: int, delta: OutputDelta, *, first: bool) -> list[str]:
        """The events of a delta, as JSON; none while there is nothing to show."""

    def usage_chunk(self, choices: Sequence[Choice]) -> str:
        """The event with the usage, as JSON."""

    def whole(self, choices: Sequence[Choice]) -> BaseModel:
        """The body of an answer that is not streamed."""


class _Answer:
    def __init__(self, prefix: str, kind: str, model_id: str, *, include_usage: bool) -> None:
        self.id = f"{prefix}-{secrets.token_hex(16)}"
        self.created = int(time.time())
        self.model_id = model_id
        head = {"id": self.id, "object": kind, "created": self.created, "model": model_id}
        # All chunks of a request have the same ends; only the choice between them differs.
        self._head = to_json(head)[:-1] + ',"choices":['
        self._tail = '],"usage":null}' if include_usage else "]}"
        self.details: AnswerDetails | None = None
        """What is asked for beside text; set before the first delta."""
        self.usage_so_far: Sequence[Choice] | None = None
        """Those whose usage every chunk tells."""

    def _extras(self, index: int, delta: OutputDelta, *, first: bool) -> ChunkExtras:
        return NOTHING if self.details is None else self.details.chunk(index, delta, first=first)

    def usage_chunk(self, choices: Sequence[Choice]) -> str:
        return f'{self._head}],"usage":{to_json(usage_of(choices).model_dump())}}}'

    def _chunk(
        self,
        index: int,
        content: str,
        finish_reason: FinishReason | None,
        extras: ChunkExtras = NOTHING,
    ) -> str:
        finish = "null" if finish_reason is None else f'"{finish_reason.value}"'
        return self._chunk_of(index, content, finish, extras)

    def _chunk_of(
        self, index: int, content: str, finish: str, extras: ChunkExtras = NOTHING
    ) -> str:
        choice = f'"index":{index},{content},"logprobs":{extras.logprobs},"finish_reason":{finish}'
        tail = self._tail
        if self.usage_so_far is not None:
            tail = f'],"usage":{to_json(usage_of(self.usage_so_far).model_dump())}}}'
        if extras is not NOTHING:
            return f"{self._head}{{{choice}{extras.of_choice}}}]{extras.of_answer}{tail[1:]}"
        return f"{self._head}{{{choice}}}{tail}"


class ChatAnswer(_Answer):
    """``/v1/chat/completions``."""

    def __init__(self, model_id: str, *, include_usage: bool) -> None:
        super().__init__("chatcmpl", "chat.completion.chunk", model_id, include_usage=include_usage)

    def chunks(self, index: int, delta: OutputDelta, *, first: bool) -> list[str]:
        events = []
        extras = self._extras(index, delta, first=first)
        if first:
            role = '"delta":{"role":"assistant","content":"","refusal":null}'
            begin = NOTHING
            if extras.of_answer:
                begin = ChunkExtras(of_answer=extras.of_answer)
                extras = replace(extras, of_answer="")
            events.append(self._chunk(index, role, None, begin))
        if delta.text or not extras.empty:
            content = f'"delta":{{"content":{to_json(delta.text)}}}'
            events.append(self._chunk(index, content, None, extras))
        if delta.finish_reason is not None:
            events.append(self._chunk(index, '"delta":{}', delta.finish_reason))
        return events

    def whole(self, choices: Sequence[Choice]) -> BaseModel:
        return openai_protocol.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model_id,
            choices=[
                openai_protocol.ChatChoice(
                    index=index,
                    message=openai_protocol.ChatMessage(content=choice.text),
                    finish_reason=choice.finish,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_of(choices),
        )


class CompletionAnswer(_Answer):
    """``/v1/completions``."""

    def __init__(self, model_id: str, *, include_usage: bool) -> None:
        super().__init__("cmpl", "text_completion", model_id, include_usage=include_usage)

    def chunks(self, index: int, delta: OutputDelta, *, first: bool) -> list[str]:
        extras = self._extras(index, delta, first=first)
        if not (first or delta.text or delta.finish_reason is not None or not extras.empty):
            return []
        text = delta.text
        if first and self.details is not None:
            text = self.details.echo(index) + text
        return [self._chunk(index, f'"text":{to_json(text)}', delta.finish_reason, extras)]

    def whole(self, choices: Sequence[Choice]) -> BaseModel:
        return openai_protocol.Completion(
            id=self.id,
            created=self.created,
            model=self.model_id,
            choices=[
                openai_protocol.CompletionChoice(
                    index=index, text=choice.text, finish_reason=choice.finish
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_of(choices),
        )
