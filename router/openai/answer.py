"""Answers in the formats of the two OpenAI endpoints, whole or in chunks."""

from __future__ import annotations

import abc
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from baton.request import FinishReason
from router.core.request import Choice, GenerationRequest, OutputDelta, without_answer
from router.http.sse import DONE, encode_events, to_json
from router.inference.endpoint import ApiAnswer
from router.openai import protocol as openai_protocol
from router.openai.answer_details import NOTHING, AnswerDetails, ChunkExtras
from router.openai.options import AnswerOptions

_MARK = "\x00text\x00"
"""Text that stands for the text of an event."""


def usage_of(choices: Sequence[Choice]) -> openai_protocol.Usage:
    """Return the token counts of OpenAI's ``usage``, summed over all prompts of a request."""
    prompt = sum(choice.prompt_tokens for choice in choices)
    completion = sum(choice.completion_tokens for choice in choices)
    reasoning = sum(choice.reasoning_tokens for choice in choices)
    details = openai_protocol.PromptTokensDetails(
        cached_tokens=sum(choice.cached_tokens for choice in choices),
        cache_write_tokens=sum(choice.written_tokens for choice in choices),
    )
    return openai_protocol.Usage(
        prompt_tokens=prompt,
        completion_tokens=completion,
        total_tokens=prompt + completion,
        prompt_tokens_details=details,
        completion_tokens_details=openai_protocol.CompletionTokensDetails(
            reasoning_tokens=reasoning
        ),
    )


class _OpenAiAnswer(ApiAnswer):
    """Base class of the answers of both OpenAI endpoints. Choices are numbered across the prompts
    of a request, in order."""

    kind: str
    """Value of the field ``object`` in the events of a stream."""

    def __init__(
        self,
        name: str,
        model_id: str,
        requests: Sequence[GenerationRequest],
        options: AnswerOptions,
        details: AnswerDetails | None,
        *,
        stream: bool,
    ) -> None:
        """Create an answer. ``details`` holds the data that the client requested in addition to
        text; None: it requested none."""
        super().__init__(requests, stream=stream)
        self._id = name
        self._model_id = model_id
        self._created = int(time.time())
        self._options = options
        self._details = details
        self._usage_before: openai_protocol.Usage | None = None
        """Usage before the current choice's first delta, if chunks include usage."""
        self._begin = ""
        """The part of a chunk before its choice."""
        # All chunks of a request begin and end alike. Only the choice in the middle differs.
        self._end = '],"usage":null}' if options.usage else "]}"
        self._is_plain = not (details or options.continuous_usage or options.no_answer)
        """Whether the events of a choice differ in their text only, except the first and the
        last."""
        self._frames: dict[int, tuple[str, str]] = {}
        """By number of a choice: the begin and the end of events that differ in their text only."""

    def events(self, prompt: int, delta: OutputDelta) -> bytes:
        """Count a prompt's delta. Return its server-sent events; empty if the client sees nothing
        of it. See ``ApiAnswer``."""
        place, delta = self._placed(prompt, delta)
        choice = self.choices[place]
        first = not choice.begun
        self._begin = self._begin or self._begin_with(delta.fingerprint)
        if self._is_plain and delta.finish_reason is None and not first:
            choice.add(delta, keep_text=False)
            if not delta.text:
                return b""
            begin, end = self._frames.get(place) or self._frame(place)
            return f"{begin}{to_json(delta.text)}{end}".encode()
        if first and self._options.continuous_usage:
            self._usage_before = usage_of(self.choices)
        choice.add(delta, keep_text=False)
        payloads = self._chunks(place, delta, first=first)
        return encode_events(payloads) if payloads else b""

    def _begin_with(self, fingerprint: str) -> str:
        fields = {
            "id": self._id,
            "object": self.kind,
            "created": self._created,
            "model": self._model_id,
            "system_fingerprint": fingerprint or None,
        }
        return to_json(fields)[:-1] + ',"choices":['

    def _frame(self, place: int) -> tuple[str, str]:
        """Return the begin and the end of the events of a choice that differ in their text only."""
        (chunk,) = self._chunks(place, OutputDelta(_MARK, (), None), first=False)
        begin, _, end = encode_events([chunk]).decode().rpartition(to_json(_MARK))
        self._frames[place] = begin, end
        return begin, end

    def last_events(self) -> bytes:
        """Return the last events of a stream whose requests have not failed. See ``ApiAnswer``."""
        return encode_events([self._usage_chunk(), DONE] if self._options.usage else [DONE])

    def keep(self, prompt: int, delta: OutputDelta) -> None:
        """Count a prompt's delta, and store it for ``whole``. See ``ApiAnswer``."""
        place, delta = self._placed(prompt, delta)
        self.choices[place].add(delta, keep_text=True)
        if self._details is not None:
            self._details.keep(place, delta)

    def whole(self) -> Mapping[str, Any]:
        """Return the body of an answer that is not streamed; see ``ApiAnswer``. The usage covers
        all generated choices, whether they are returned or not."""
        details = self._details
        if details is None:
            return self._body(self.choices).model_dump()
        places = details.best()
        body = self._body([self.choices[place] for place in places]).model_dump()
        body["usage"] = usage_of(self.choices).model_dump()
        details.complete(body, places)
        return body

    @abc.abstractmethod
    def _chunks(self, place: int, delta: OutputDelta, *, first: bool) -> list[str]:
        """Return the events for a delta of the choice with the number ``place``, each as JSON; an
        empty list if there is nothing to show."""

    @abc.abstractmethod
    def _body(self, choices: Sequence[Choice]) -> BaseModel:
        """Return the body of an answer that is not streamed, without details."""

    def _placed(self, prompt: int, delta: OutputDelta) -> tuple[int, OutputDelta]:
        place = prompt * self._options.best_of + delta.choice
        return place, without_answer(delta) if self._options.no_answer else delta

    def _extras(self, place: int, delta: OutputDelta, *, first: bool) -> ChunkExtras:
        details = self._details
        return NOTHING if details is None else details.chunk(place, delta, first=first)

    def _usage_chunk(self) -> str:
        return f'{self._begin}],"usage":{to_json(usage_of(self.choices).model_dump())}}}'

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
        self,
        index: int,
        content: str,
        finish: str,
        extras: ChunkExtras = NOTHING,
        usage: openai_protocol.Usage | None = None,
    ) -> str:
        """Build a chunk of the choice with the number ``index``. ``usage``, if given, replaces the
        token counts of all choices so far."""
        choice = f'"index":{index},{content},"logprobs":{extras.logprobs},"finish_reason":{finish}'
        tail = self._end
        if self._options.continuous_usage:
            usage = usage_of(self.choices) if usage is None else usage
            tail = f'],"usage":{to_json(usage.model_dump())}}}'
        if extras is not NOTHING:
            return f"{self._begin}{{{choice}{extras.of_choice}}}]{extras.of_answer}{tail[1:]}"
        return f"{self._begin}{{{choice}}}{tail}"


class ChatAnswer(_OpenAiAnswer):
    """An answer of ``/v1/chat/completions``."""

    kind = "chat.completion.chunk"

    def _chunks(self, index: int, delta: OutputDelta, *, first: bool) -> list[str]:
        events = []
        extras = self._extras(index, delta, first=first)
        if first:
            begin = NOTHING
            if extras.of_answer:
                begin = ChunkExtras(of_answer=extras.of_answer)
                extras = replace(extras, of_answer="")
            events.append(self._role_chunk(index, begin))
        if delta.text or not extras.empty:
            content = f'"delta":{{"content":{to_json(delta.text)}}}'
            events.append(self._chunk(index, content, None, extras))
        if delta.finish_reason is not None:
            events.append(self._chunk(index, '"delta":{}', delta.finish_reason))
        return events

    def _role_chunk(self, index: int, extras: ChunkExtras = NOTHING) -> str:
        """Build the first chunk of a choice, which gives the message's role. The chunk's usage
        counts none of the choice's tokens."""
        role = '"delta":{"role":"assistant","content":"","refusal":null}'
        return self._chunk_of(index, role, "null", extras, self._usage_before)

    def _body(self, choices: Sequence[Choice]) -> BaseModel:
        return openai_protocol.ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model_id,
            choices=[
                openai_protocol.ChatChoice(
                    index=index,
                    message=openai_protocol.ChatMessage(content=choice.text),
                    finish_reason=choice.finish,
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_of(choices),
            system_fingerprint=self.fingerprint or None,
        )


class CompletionAnswer(_OpenAiAnswer):
    """An answer of ``/v1/completions``."""

    kind = "text_completion"

    def _chunks(self, index: int, delta: OutputDelta, *, first: bool) -> list[str]:
        extras = self._extras(index, delta, first=first)
        if not (first or delta.text or delta.finish_reason is not None or not extras.empty):
            return []
        text = delta.text
        if first and self._details is not None:
            text = self._details.echo(index) + text
        return [self._chunk(index, f'"text":{to_json(text)}', delta.finish_reason, extras)]

    def _body(self, choices: Sequence[Choice]) -> BaseModel:
        return openai_protocol.Completion(
            id=self._id,
            created=self._created,
            model=self._model_id,
            choices=[
                openai_protocol.CompletionChoice(
                    index=index, text=choice.text, finish_reason=choice.finish
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_of(choices),
            system_fingerprint=self.fingerprint or None,
        )
