"""Prompts: converts a conversation, a text or token ids to the token ids that workers compute.

A conversation is a list of turns (``router.conversation``), which are written so that the model's
chat template takes them.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from baton.config.cluster import Config
from baton.errors import ContextLengthExceeded, DeadlineExceeded, InvalidRequest
from baton.host.background import INLINE, off_loop
from baton.host.turns import FairTurns
from baton.sandbox.sandbox import MAX_WAIT_S
from router.conversation.fit import fitted, parsed
from router.conversation.template_form import TemplateForm, form_of
from router.conversation.turns import Turn, check_message_count, is_about_tools
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

Prompt = str | tuple[int, ...]
Ending = Literal["answer", "closed", "open"]
"""How a conversation's prompt ends. ``answer``: the template begins the assistant's turn.
``closed``: the prompt ends after the last message. ``open``: the last message stays open, and the
answer continues it."""
TEXTS_AT_ONCE = 4
"""Maximum number of long texts that are rendered and tokenized at a time."""
_PROMPT_CHARACTERS = 64
"""Number of characters that one prompt or message counts for, in addition to its text."""
MAX_TEXT_TOKENS = 131_072
"""Maximum number of tokens to count, tokenize or detokenize in one request, unless the model's
context is longer."""
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
        self._forms: dict[ChatTemplate, TemplateForm] = {}

    async def start(self) -> None:
        """Find out what the model's chat templates take, before the first conversation needs it.

        Raises what ``form_of`` raises.
        """
        if self._tokenizer.has_chat_template:
            template = self._tokenizer.chat_template
            for one in {template, template.for_tools}:
                await self._form(one)

    async def _form(self, template: ChatTemplate) -> TemplateForm:
        if template not in self._forms:
            self._forms[template] = await form_of(template)
        return self._forms[template]

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
        values, template = None, self._tokenizer.chat_template
        if tools is not None or any(is_about_tools(turn) for turn in turns):
            template = template.for_tools
            values = [tool.as_template_value() for tool in tools.tools] if tools else []
        form = await self._form(template)
        if any("tool_calls" in turn for turn in turns):
            turns = await parsed(turns, form)
        turns = await off_loop(
            size, partial(fitted, turns, tools, template, self._tool_format, form)
        )
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


def _with_thinking(turn: Turn) -> Turn:
    """Copy a message's reasoning to the field ``thinking``, which gpt-oss's template reads. That
    template does not allow content and ``thinking`` together."""
    reasoning = turn.get("reasoning_content")
    return turn if not reasoning or turn["content"] else {**turn, "thinking": reasoning}


def _characters(turn: Turn) -> int:
    calls = turn.get("tool_calls", ())
    text = len(turn["content"]) + len(turn.get("reasoning_content", ""))
    return text + sum(len(call["function"]["arguments"]) for call in calls)
