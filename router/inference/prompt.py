"""Prompts: converts a conversation, a text or token ids to the token ids that workers compute.

A conversation is a list of turns, as chat templates take them. If the model's template does not
support tools, they are written into the text of the turns.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import pydantic_core

from baton.config.cluster import Config
from baton.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from baton.host.background import INLINE, off_loop
from baton.host.turns import FairTurns
from baton.sandbox.sandbox import MAX_WAIT_S
from router.dialects.formats import ToolFormat
from router.dialects.tools import ToolUse
from router.inference.sampling_input import (
    SamplingInput,
    banned_runs,
    check_prompt_length,
    check_token_ids,
    kept_tokens,
)
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer

Turn = Mapping[str, Any]
"""A message of a conversation: ``role``, ``content``, an assistant's ``tool_calls`` and
``reasoning_content``, and a tool result's ``tool_call_id``."""
Prompt = str | tuple[int, ...]
Ending = Literal["answer", "closed", "open"]
"""How a conversation's prompt ends. ``answer``: the template begins the assistant's turn.
``closed``: the prompt ends after the last message. ``open``: the last message stays open, and the
answer continues it."""
TEXTS_AT_ONCE = 4
"""Maximum number of long texts that are rendered and tokenized at a time."""
_PROMPT_CHARACTERS = 64
"""Number of characters that one prompt or message counts for, in addition to its text."""
MAX_MESSAGES = 2048
"""Maximum number of messages in a conversation, as at OpenAI."""
MAX_TEXT_TOKENS = 131_072
"""Maximum number of tokens to count, tokenize or detokenize in one request, unless the model's
context is longer."""
MAX_ARGUMENT_VALUES = 131_072
"""Maximum number of JSON values in the arguments of one tool call. Commas and brackets are counted,
not values."""
MAX_PARSED_CHARACTERS = 64 << 10
"""Maximum number of characters of tool call arguments that are parsed before control returns to the
event loop."""
MAX_VARIABLES_CHARACTERS = 64 << 10
"""Maximum number of characters of a client's variables for the chat template, as JSON."""
_OWN_FIELDS = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of chat templates that are set from other request fields. Clients must not set them as
variables."""
_OPEN_END = "<end of the message that stays open> "
"""Marks the end of the open message while the template is rendered. Its space shows whether the
template keeps white space at a message's end."""
_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})
_NOTHING_ASKED = SamplingInput()


class PromptEncoder:
    """Converts prompts to token ids. Owned by the event loop.

    A separate process renders the chat template, and threads tokenize the texts. Texts of more than
    ``INLINE`` characters take turns, fairly among tenants."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tool_format: ToolFormat,
        config: Config,
        context_length: Callable[[], int],
    ) -> None:
        """Create an encoder. ``context_length`` returns the maximum number of tokens of prompt and
        answer together."""
        self._tokenizer = tokenizer
        self._tool_format = tool_format
        self._max_characters = config.max_body_bytes
        self._context_length = context_length
        self._turns = FairTurns("long texts", TEXTS_AT_ONCE)

    async def chat_ids(
        self,
        tenant: str,
        turns: Sequence[Turn],
        tools: ToolUse | None = None,
        sampling: SamplingInput = _NOTHING_ASKED,
        *,
        ending: Ending = "answer",
        variables: Mapping[str, Any] = _NO_VARIABLES,
        special: bool = False,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation.

        ``variables``: additional variables for the chat template, which runs in a sandbox.
        ``special``: true if the tokenizer's special tokens are added to those of the template.
        Raises InvalidRequest, ContextLengthExceeded, DeadlineExceeded, Overloaded."""
        check_message_count(len(turns))
        size = sum(map(_characters, turns)) + (0 if tools is None else tools.characters)
        # Templates add some text to each message. The limit stops a runaway template from filling
        # memory.
        limit = 4 * self._max_characters if tools else self._max_characters
        limit += 4096 + 256 * len(turns)
        async with self._turn(tenant, size + _PROMPT_CHARACTERS * len(turns)):
            if any("tool_calls" in turn for turn in turns):
                template = self._tokenizer.chat_template.for_tools
                turns = turns if template.joins_arguments else await parsed(turns)
            text = await self._chat_text(turns, tools, size, limit, ending, variables)
            return await off_loop(
                len(text), lambda: self._encoded(text, sampling, "messages", special=special)
            )

    async def prompt_ids(
        self, tenant: str, prompts: Sequence[Prompt], sampling: SamplingInput, param: str
    ) -> list[tuple[int, ...]]:
        """Return the token ids of each prompt. ``param``: the name of the client's field that has
        the prompts.

        Raises InvalidRequest, ContextLengthExceeded, Overloaded."""
        size = sum(map(len, prompts)) + _PROMPT_CHARACTERS * len(prompts)
        async with self._turn(tenant, size):
            return await off_loop(
                size, lambda: [self._prompt_ids(prompt, sampling, param) for prompt in prompts]
            )

    async def text_ids(self, tenant: str, text: str, *, special: bool) -> tuple[int, ...]:
        """Return the token ids of a text that is not a prompt.

        ``special``: true if the tokenizer's special tokens are added. Raises InvalidRequest,
        Overloaded.
        """
        encode = partial(
            self._tokenizer.encode,
            text,
            add_special_tokens=special,
            check=lambda count: self.check_count(count, "prompt"),
        )
        async with self._turn(tenant, len(text)):
            return await off_loop(len(text), encode)

    async def text_of(self, tenant: str, token_ids: Sequence[int], param: str) -> str:
        """Return the text of token ids, including special tokens. Raises InvalidRequest,
        Overloaded.
        """
        self.check_count(len(token_ids), param)
        check_token_ids(token_ids, self._tokenizer.vocab_size, param)
        decode = partial(self._tokenizer.decode, token_ids, skip_special_tokens=False)
        async with self._turn(tenant, len(token_ids)):
            return await off_loop(len(token_ids), decode)

    async def banned_runs(
        self, tenant: str, words: Sequence[str] | None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences that must not be generated, so that none of a client's words
        appear. Raises InvalidRequest, Overloaded."""
        if not words:
            return ()
        size = sum(map(len, words))
        async with self._turn(tenant, size):
            return await off_loop(
                32 * len(words) + size, partial(banned_runs, self._tokenizer, words)
            )

    def check_count(self, tokens: int, param: str) -> None:
        """Check that a text which is not a prompt does not have too many tokens. Raises
        InvalidRequest.
        """
        limit = max(MAX_TEXT_TOKENS, self._context_length())
        if tokens > limit:
            raise InvalidRequest(
                f"{param} has {tokens} tokens; at most {limit} are possible", param=param
            )

    def _turn(self, tenant: str, size: int) -> AbstractAsyncContextManager[None]:
        return self._turns.turn(tenant) if size > INLINE else nullcontext()

    async def _chat_text(
        self,
        turns: Sequence[Turn],
        tools: ToolUse | None,
        size: int,
        limit: int,
        ending: Ending,
        variables: Mapping[str, Any],
    ) -> str:
        final = turns[-1]["content"]
        if ending == "open":
            turns = [*turns[:-1], {**turns[-1], "content": f"{turns[-1]['content']}{_OPEN_END}"}]
        values = None
        if tools is not None or any(is_about_tools(turn) for turn in turns):
            template = self._tokenizer.chat_template.for_tools
            turns = await off_loop(size, partial(fitted, turns, tools, template, self._tool_format))
            values = [tool.as_template_value() for tool in tools.tools] if tools else []
        if self._tokenizer.chat_template.mentions("thinking"):
            turns = [_with_thinking(turn) for turn in turns]
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
        return _cut_open(text, final) if ending == "open" else text

    def _prompt_ids(self, prompt: Prompt, sampling: SamplingInput, param: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return self._encoded(prompt, sampling, param, special=True)
        last = kept_tokens(sampling, self._context_length())
        ids = prompt if last is None else prompt[-last:]
        check_prompt_length(len(ids), self._context_length(), param)
        check_token_ids(ids, self._tokenizer.vocab_size, param)
        return ids

    def _encoded(
        self, text: str, sampling: SamplingInput, param: str, *, special: bool
    ) -> tuple[int, ...]:
        context = self._context_length()
        last = kept_tokens(sampling, context)
        if last is None:
            self._check_size(text, param)
        ids = self._tokenizer.encode(
            text,
            add_special_tokens=special,
            last=last,
            check=lambda count: check_prompt_length(count, context, param),
        )
        self._tokenizer.check_embedded(ids, param)
        return ids

    def _check_size(self, text: str, param: str) -> None:
        """Reject a text that is too long for the context, before seconds are spent on tokenizing
        it.
        """
        least = self._tokenizer.fewest_tokens(text)
        context = self._context_length()
        if least >= context:
            raise ContextLengthExceeded(
                f"the model's context is {context} tokens, the prompt has at least {least}",
                param=param,
            )


def _cut_open(text: str, final: str) -> str:
    """Cut a rendered conversation at the end of ``final``, its last message. Raises InvalidRequest.

    As in Hugging Face transformers, white space at the message's end stays if the template keeps
    it.
    """
    mark = _OPEN_END.strip()
    at = text.rfind(mark)
    if at < 0 or final.strip() not in text:
        raise InvalidRequest(
            "the model's chat template does not render the last message's text as it is: the"
            " message cannot be continued",
            param="continue_final_message",
        )
    return text[:at] if text.startswith(_OPEN_END, at) else text[:at].rstrip()


def checked_variables(variables: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Check that a client's variables for the chat template set no reserved name. Raises
    InvalidRequest.
    """
    if taken := sorted(_OWN_FIELDS & variables.keys()):
        raise InvalidRequest(
            f"{param} must not set {taken[0]}: it has a field of its own", param=param
        )
    if variables and len(json.dumps(variables)) > MAX_VARIABLES_CHARACTERS:
        raise InvalidRequest(
            f"{param} has at most {MAX_VARIABLES_CHARACTERS} characters as JSON", param=param
        )
    return variables


def is_about_tools(turn: Turn) -> bool:
    """Return whether a message has tool calls, or is the result of one."""
    return turn["role"] == "tool" or "tool_calls" in turn


def fitted(
    turns: Sequence[Turn], use: ToolUse | None, template: ChatTemplate, form: ToolFormat
) -> list[Turn]:
    """Return the messages, with what ``template`` does not support written into their text.

    Tools go into the system message, and calls into the assistant's messages. Results become
    messages of the user, as in the templates of Hermes and Qwen.
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
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**rest, "content": f"{content}\n{calls}" if content else calls}


def _with_thinking(turn: Turn) -> Turn:
    """Copy a message's reasoning to the field ``thinking``, which gpt-oss's template reads. That
    template does not allow content and ``thinking`` together."""
    reasoning = turn.get("reasoning_content")
    return turn if not reasoning or turn["content"] else {**turn, "thinking": reasoning}


def _as_user(turn: Turn, form: ToolFormat) -> Turn:
    if turn["role"] != "tool":
        return turn
    return {"role": "user", "content": form.result(turn["content"])}


def _with_instructions(turns: list[Turn], instructions: str) -> list[Turn]:
    if turns and turns[0]["role"] == "system":
        first, rest = turns[0], turns[1:]
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *rest]
    return [{"role": "system", "content": instructions}, *turns]


def calls_turn(content: str, calls: Sequence[tuple[str, str, Any]]) -> Turn:
    """Build an assistant's message from tool calls, each with id, name and arguments.

    Arguments stay JSON text until ``parsed`` is called.
    """
    values = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": given}}
        for name, tool, given in calls
    ]
    # Some templates fail if content is null.
    return {"role": "assistant", "content": content, "tool_calls": values}


def with_reasoning(turn: Turn, reasoning: str | None) -> Turn:
    """Return an assistant's message with the reasoning that precedes it, if there is any."""
    return {**turn, "reasoning_content": reasoning} if reasoning else turn


def result_turn(call_id: str, content: str) -> Turn:
    """Build the message that holds a tool call's result."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def check_message_count(messages: int) -> None:
    """Check that a conversation does not have too many messages. Raises InvalidRequest."""
    if messages > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages are possible", param="messages")


def _characters(turn: Turn) -> int:
    calls = turn.get("tool_calls", ())
    text = len(turn["content"]) + len(turn.get("reasoning_content", ""))
    return text + sum(len(call["function"]["arguments"]) for call in calls)


async def parsed(turns: Sequence[Turn]) -> list[Turn]:
    """Return the messages with the arguments of their tool calls parsed. Raises InvalidRequest."""
    found, size = list[Turn](), 0
    for place, turn in enumerate(turns):
        if "tool_calls" not in turn:
            found.append(turn)
            continue
        calls = []
        for call in turn["tool_calls"]:
            function = call["function"]
            value = _value(function["arguments"], f"messages[{place}].tool_calls")
            calls.append({**call, "function": {**function, "arguments": value}})
            size += len(function["arguments"])
            if size > MAX_PARSED_CHARACTERS:
                await asyncio.sleep(0)
                size = 0
        found.append({**turn, "tool_calls": calls})
    return found


def _value(arguments: str, param: str) -> Any:
    """Parse the arguments of a tool call. Text that is not a JSON object is returned as it is."""
    if len(arguments) > MAX_PARSED_CHARACTERS:
        values = sum(arguments.count(mark) for mark in ",[{")
        if values > MAX_ARGUMENT_VALUES:
            raise InvalidRequest(
                f"the arguments of a call have at most {MAX_ARGUMENT_VALUES} values", param=param
            )
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments
