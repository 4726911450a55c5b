"""Chat completions whose answers may call tools."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel

from baton.request import FinishReason
from router.core.choice import Choice
from router.core.request import OutputDelta
from router.http.sse import to_json
from router.openai import protocol as openai_protocol
from router.openai.answer import ChatAnswer, usage_of
from router.tool_calls.formats import ToolFormat
from router.tool_calls.pieces import CallBegun, Content, Piece
from router.tool_calls.tool_output import OutputCall, ToolOutput
from router.tool_calls.tools import CalledFunction, MessageToolCall, ToolUse


class ToolChatAnswer(ChatAnswer):
    """``/v1/chat/completions`` with tools."""

    def __init__(
        self, model_id: str, form: ToolFormat, use: ToolUse, *, include_usage: bool
    ) -> None:
        super().__init__(model_id, include_usage=include_usage)
        self._form = form
        self._use = use
        self._outputs: dict[int, ToolOutput] = {}

    def chunks(self, index: int, delta: OutputDelta, *, first: bool) -> list[str]:
        if first:
            self._outputs[index] = ToolOutput(self._form, self._use)
        output = self._outputs[index]
        events = []
        if first:
            role = '"delta":{"role":"assistant","content":"","refusal":null}'
            events.append(self._chunk(index, role, None))
        place = len(output.calls) - 1
        for piece in output.feed(delta.text, last=delta.finish_reason is not None):
            place += isinstance(piece, CallBegun)
            content = _delta(piece, place, output)
            events.append(self._chunk(index, f'"delta":{content}', None))
        extras = self._extras(index, delta, first=first)
        if not extras.empty:
            # Scores are of tokens, and pieces of calls are not.
            events.append(self._chunk(index, '"delta":{}', None, extras))
        if delta.finish_reason is not None:
            events.append(self._last(index, delta.finish_reason, output))
        return events

    def _last(self, index: int, reason: FinishReason, output: ToolOutput) -> str:
        if reason is FinishReason.STOP and output.calls:
            return self._chunk_of(index, '"delta":{}', '"tool_calls"')
        return self._chunk(index, '"delta":{}', reason)

    def whole(self, choices: Sequence[Choice]) -> BaseModel:
        return openai_protocol.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model_id,
            choices=[self._choice(index, choice) for index, choice in enumerate(choices)],
            usage=usage_of(choices),
        )

    def _choice(self, index: int, choice: Choice) -> openai_protocol.ChatChoice:
        output = ToolOutput(self._form, self._use)
        output.feed(choice.text, last=True)
        if not output.calls:
            return openai_protocol.ChatChoice(
                index=index,
                message=openai_protocol.ChatMessage(content=output.content),
                finish_reason=choice.finish,
            )
        stopped = choice.finish_reason is FinishReason.STOP
        return openai_protocol.ChatChoice(
            index=index,
            message=openai_protocol.ToolCallMessage(
                content=output.content or None, tool_calls=[_call(one) for one in output.calls]
            ),
            finish_reason="tool_calls" if stopped else choice.finish,
        )


def _delta(piece: Piece, place: int, output: ToolOutput) -> str:
    if isinstance(piece, Content):
        return f'{{"content":{to_json(piece.text)}}}'
    if isinstance(piece, CallBegun):
        call = output.calls[place]
        head = f'"id":{to_json(call.id)},"type":"function"'
        function = f'{{"name":{to_json(call.name)},"arguments":""}}'
    else:
        head, function = "", f'{{"arguments":{to_json(piece.text)}}}'
    fields = ",".join(part for part in (f'"index":{place}', head, f'"function":{function}') if part)
    return f'{{"tool_calls":[{{{fields}}}]}}'


def _call(call: OutputCall) -> MessageToolCall:
    return MessageToolCall(
        id=call.id, function=CalledFunction(name=call.name, arguments=call.arguments)
    )
