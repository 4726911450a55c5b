"""Answers of ``/v1/chat/completions`` that are parsed into reasoning, content and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from baton.request import FinishReason
from router.core.request import Choice, GenerationRequest, OutputDelta
from router.dialects.dialect import Dialect
from router.dialects.output import OutputCall, ParsedOutput
from router.dialects.pieces import Arguments, CallEnd, CallStart, Content, Reasoning
from router.dialects.tools import (
    CalledFunction,
    CustomToolInput,
    MessageCustomToolCall,
    MessageToolCall,
    ToolUse,
    custom_input,
    custom_names,
)
from router.http.sse import to_json
from router.openai.answer import ChatAnswer, usage_of
from router.openai.answer_details import AnswerDetails
from router.openai.options import AnswerOptions
from router.openai.protocol import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    ReasonedMessage,
    ReasonedToolCallMessage,
    ToolCallMessage,
)


class ParsedChatAnswer(ChatAnswer):
    """An answer of ``/v1/chat/completions`` with tools, or of a model that reasons."""

    def __init__(
        self,
        name: str,
        model_id: str,
        requests: Sequence[GenerationRequest],
        options: AnswerOptions,
        details: AnswerDetails | None,
        dialect: Dialect,
        use: ToolUse | None,
        *,
        stream: bool,
        shows_reasoning: bool,
    ) -> None:
        """Create an answer. ``use`` names the tools that may be called. The reasoning can be hidden
        from the client."""
        super().__init__(name, model_id, requests, options, details, stream=stream)
        self._is_plain = False  # what an event shows depends on the text before it
        self._dialect = dialect
        self._use = use
        self._custom = custom_names(use)
        self._begins_in = requests[0].begins_in
        self._shows_reasoning = shows_reasoning
        self._outputs: dict[int, ParsedOutput] = {}

    def _chunks(self, index: int, delta: OutputDelta, *, first: bool) -> list[str]:
        if first:
            self._outputs[index] = self._output()
        output = self._outputs[index]
        events = []
        if first:
            events.append(self._role_chunk(index))
        place = len(output.calls) - 1
        for piece in output.feed(delta.text, last=delta.finish_reason is not None):
            hidden = isinstance(piece, Reasoning) and not self._shows_reasoning
            place += isinstance(piece, CallStart)
            is_custom = place >= 0 and output.calls[place].name in self._custom
            if isinstance(piece, CallEnd) and is_custom:
                content = _custom_delta(output.calls[place], place)
            elif isinstance(piece, CallEnd) or hidden:
                continue
            elif isinstance(piece, CallStart | Arguments) and is_custom:
                continue  # its input is known at its end
            else:
                content = _delta(piece, place, output)
            events.append(self._chunk(index, f'"delta":{content}', None))
        extras = self._extras(index, delta, first=first)
        if not extras.empty:
            # Scores belong to tokens, which do not match the pieces of calls.
            events.append(self._chunk(index, '"delta":{}', None, extras))
        if delta.finish_reason is not None:
            events.append(self._last(index, delta.finish_reason, output))
        return events

    def _output(self) -> ParsedOutput:
        return ParsedOutput(self._dialect, self._use, self._begins_in)

    def _last(self, index: int, reason: FinishReason, output: ParsedOutput) -> str:
        if reason is FinishReason.STOP and output.calls:
            return self._chunk_of(index, '"delta":{}', '"tool_calls"')
        return self._chunk(index, '"delta":{}', reason)

    def _body(self, choices: Sequence[Choice]) -> BaseModel:
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model_id,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage_of(choices),
            system_fingerprint=self.fingerprint or None,
        )

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        output = self._output()
        output.feed(choice.text, last=True)
        stopped = choice.finish_reason is FinishReason.STOP
        return ChatChoice(
            index=index,
            message=self._message(output),
            finish_reason="tool_calls" if stopped and output.calls else choice.finish,
        )

    def _message(self, output: ParsedOutput) -> ChatMessage | ToolCallMessage:
        reasoning = output.reasoning if self._shows_reasoning else ""
        reasoned = {"reasoning_content": reasoning, "reasoning": reasoning}
        if output.calls:
            content, calls = output.content or None, [self._call(one) for one in output.calls]
            if reasoning:
                return ReasonedToolCallMessage(content=content, tool_calls=calls, **reasoned)
            return ToolCallMessage(content=content, tool_calls=calls)
        if reasoning:
            return ReasonedMessage(content=output.content, **reasoned)
        return ChatMessage(content=output.content)

    def _call(self, call: OutputCall) -> MessageToolCall | MessageCustomToolCall:
        if call.name in self._custom:
            given = CustomToolInput(name=call.name, input=custom_input(call.arguments))
            return MessageCustomToolCall(id=call.id, custom=given)
        function = CalledFunction(name=call.name, arguments=call.arguments)
        return MessageToolCall(id=call.id, function=function)


def _delta(
    piece: Content | Reasoning | CallStart | Arguments, place: int, output: ParsedOutput
) -> str:
    if isinstance(piece, Reasoning):
        text = to_json(piece.text)
        return f'{{"reasoning_content":{text},"reasoning":{text}}}'
    if isinstance(piece, Content):
        return f'{{"content":{to_json(piece.text)}}}'
    if isinstance(piece, CallStart):
        call = output.calls[place]
        head = f'"id":{to_json(call.id)},"type":"function"'
        function = f'{{"name":{to_json(call.name)},"arguments":""}}'
    else:
        head, function = "", f'{{"arguments":{to_json(piece.text)}}}'
    fields = ",".join(part for part in (f'"index":{place}', head, f'"function":{function}') if part)
    return f'{{"tool_calls":[{{{fields}}}]}}'


def _custom_delta(call: OutputCall, place: int) -> str:
    custom = {"name": call.name, "input": custom_input(call.arguments)}
    whole = {"index": place, "id": call.id, "type": "custom", "custom": custom}
    return to_json({"tool_calls": [whole]})
