"""Prompts: from a conversation, a text or token ids to the token ids that workers compute.

A conversation is a list of turns, as chat templates take them. What the model's template does not
know of tools is written into the text of the turns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import pydantic_core

from baton.config.cluster import Config
from baton.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from baton.host.background import off_loop
from router.inference.sampling_input import SamplingInput, check_token_ids, truncated
from router.text.chat_template import MAX_WAIT_S, ChatTemplate
from router.text.tokenizer import Tokenizer
from router.tool_calls.formats import ToolFormat
from router.tool_calls.tools import ToolUse

Turn = Mapping[str, Any]
"""A message: ``role``, ``content``, an assistant's ``tool_calls``, a result's ``tool_call_id``."""
Prompt = str | tuple[int, ...]
Ending = Literal["answer", "closed", "open"]
"""How a conversation's prompt ends: the template begins the assistant's turn (``answer``), or ends
behind the last message (``closed``), or the last message stays open, and the answer goes on there.
"""
_OWN_FIELDS = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of the template that come from fields of their own."""
_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_NOTHING_ASKED = SamplingInput()


class PromptEncoder:
    """Makes the token ids of prompts. Texts are rendered and tokenized off the event loop."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_format: ToolFormat,
        config: Config,
        context_length: Callable[[], int],
    ) -> None:
        """``context_length``: the maximum number of tokens of prompt and answer together."""
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._max_characters = config.max_body_bytes
        self._context_length = context_length

    async def chat_ids(
        self,
        turns: Sequence[Turn],
        tools: ToolUse | None = None,
        sampling: SamplingInput = _NOTHING_ASKED,
        *,
        ending: Ending = "answer",
        variables: Mapping[str, Any] = _NO_VARIABLES,
    ) -> tuple[int, ...]:
        """The token ids of a conversation.

        ``variables``: more variables of the template, which runs in a sandbox. Raises
        InvalidRequest, ContextLengthExceeded, DeadlineExceeded.
        """
        size = sum(len(turn["content"]) for turn in turns)
        size += 0 if tools is None else tools.characters
        # Templates add some text to each message; a runaway one must not fill the memory.
        limit = 4 * self._max_characters if tools else self._max_characters
        limit += 4096 + 256 * len(turns)
        text = await self._chat_text(turns, tools, limit, ending, variables)
        return await off_loop(len(text), lambda: self._chat_ids(text, sampling))

    async def prompt_ids(
        self, prompts: Sequence[Prompt], sampling: SamplingInput, param: str
    ) -> list[tuple[int, ...]]:
        """The token ids of each of some prompts; ``param`` is what the client calls them.

        Raises InvalidRequest, ContextLengthExceeded.
        """
        size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await off_loop(
            size, lambda: [self._prompt_ids(prompt, sampling, param) for prompt in prompts]
        )

    async def _chat_text(
        self,
        turns: Sequence[Turn],
        tools: ToolUse | None,
        limit: int,
        ending: Ending,
        variables: Mapping[str, Any],
    ) -> str:
        values = None
        if tools is not None or any(is_about_tools(turn) for turn in turns):
            template = self._tokenizer.chat_template.for_tools
            turns = fitted(turns, tools, template, self._tool_format)
            values = [tool.as_template_value() for tool in tools.tools] if tools else []
        rendering = self._tokenizer.render_chat(
            turns, limit, values, variables, generation_prompt=ending == "answer"
        )
        try:
            async with asyncio.timeout(MAX_WAIT_S):
                text = await asyncio.wrap_future(rendering)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the messages were not rendered within {MAX_WAIT_S:.0f} s: the router is"
                " overloaded"
            ) from None
        return _cut_behind(text, turns[-1]["content"]) if ending == "open" else text

    def _chat_ids(self, text: str, sampling: SamplingInput) -> tuple[int, ...]:
        if sampling.truncate is None:
            self._check_size(text, "messages")
        ids = self._tokenizer.encode(text, add_special_tokens=False)
        return truncated(ids, sampling, self._context_length())

    def _prompt_ids(self, prompt: Prompt, sampling: SamplingInput, param: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            if sampling.truncate is None:
                self._check_size(prompt, param)
            ids = self._tokenizer.encode(prompt)
        else:
            check_token_ids(prompt, self._tokenizer.vocab_size, param)
            ids = prompt
        return truncated(ids, sampling, self._context_length())

    def _check_size(self, text: str, param: str) -> None:
        """Refuse what cannot fit before spending seconds on tokenising it."""
        least = self._tokenizer.fewest_tokens(text)
        context = self._context_length()
        if least >= context:
            raise ContextLengthExceeded(
                f"the model's context is {context} tokens, the prompt has at least {least}",
                param=param,
            )


def _cut_behind(text: str, final: str) -> str:
    """A rendered conversation up to the end of its last message's text. Raises InvalidRequest."""
    final = final.strip()
    at = text.rfind(final)
    if not final or at < 0:
        raise InvalidRequest(
            "the last message has no text of its own in the model's chat template",
            param="continue_final_message",
        )
    return text[: at + len(final)]


def checked_variables(variables: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Raises InvalidRequest for one that comes from elsewhere."""
    if taken := sorted(_OWN_FIELDS & variables.keys()):
        raise InvalidRequest(
            f"{param} must not set {taken[0]}: it has a field of its own", param=param
        )
    return variables


def is_about_tools(turn: Turn) -> bool:
    """Whether ``turn`` has calls, or is a call's result."""
    return turn["role"] == "tool" or "tool_calls" in turn


def fitted(
    turns: Sequence[Turn], use: ToolUse | None, template: ChatTemplate, form: ToolFormat
) -> list[Turn]:
    """Write what ``template`` does not know into the text of the messages.

    Tools go into the system message, calls into the assistant's. Results go into messages of the
    user, as the templates of Hermes and Qwen do it.
    """
    fit: list[Turn] = list(turns)
    if not template.knows_calls:
        fit = [_with_written_calls(turn, form) for turn in fit]
    if not template.knows_results:
        fit = [_as_user(turn, form) for turn in fit]
    if use is not None and not template.knows_tools:
        fit = _with_instructions(fit, form.instructions(use.tools))
    return fit


def _with_written_calls(turn: Turn, form: ToolFormat) -> Turn:
    if "tool_calls" not in turn:
        return turn
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = form.written([(one["name"], one["arguments"]) for one in functions])
    content = turn["content"]
    return {"role": turn["role"], "content": f"{content}\n{calls}" if content else calls}


def _as_user(turn: Turn, form: ToolFormat) -> Turn:
    if turn["role"] != "tool":
        return turn
    return {"role": "user", "content": form.result(turn["content"])}


def _with_instructions(turns: list[Turn], instructions: str) -> list[Turn]:
    if turns and turns[0]["role"] == "system":
        first, rest = turns[0], turns[1:]
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *rest]
    return [{"role": "system", "content": instructions}, *turns]


def calls_turn(content: str, calls: Sequence[tuple[str, str, str]]) -> Turn:
    """An assistant's message with calls: their ids, names and arguments as JSON."""
    values = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": _value(given)}}
        for name, tool, given in calls
    ]
    # Some templates fail on a content that is null.
    return {"role": "assistant", "content": content, "tool_calls": values}


def result_turn(call_id: str, content: str) -> Turn:
    """What a call has given."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _value(arguments: str) -> Any:
    """Templates write arguments as JSON themselves; what is none is passed on as text."""
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
