"""A model's chat template: renders messages to the text form that the model was trained on.

A template is a program that comes with a model, often from a hub. jinja2's sandbox keeps it from
Python's internals, but lets it fill the memory or run forever, and a thread cannot be stopped. So
router.text.template_program runs it in a sandboxed process (baton.sandbox).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import MappingProxyType
from typing import Any

import jinja2.nodes

from baton.errors import ConfigError, InvalidRequest
from baton.sandbox.sandbox import BoundExceeded, Bounds, ProgramBroken, Sandbox
from router.text.template_program import chat_environment

MAX_SOURCE_CHARACTERS = 1 << 20
"""Maximum number of characters of a chat template's source."""
_MESSAGE_CHARACTERS = 64
"""Number of characters that each message counts in addition to its text."""
_TOOL_VARIABLES = ("tools", "xml_tools")
"""Names of the template variable for tools; SmolLM3 uses the second."""


class ChatTemplate:
    """A model's chat template, rendered by a process of its own.

    ``knows_tools``: the template writes tools into the prompt. ``knows_calls``: it writes the calls
    of earlier answers. ``knows_results``: it handles messages of the role ``tool``.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None
    ) -> None:
        """Create a template. ``special_tokens`` gives the text of each special token by its name in
        templates, such as ``bos_token``.

        ``tool_use`` is the source of the model's other template, for conversations with tools.
        Raises ConfigError if a template cannot be parsed.
        """
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ConfigError(
                f"the model's chat template has more than {MAX_SOURCE_CHARACTERS} characters"
            )
        try:
            # Only parse it here: compiling would compute its constants without bounds.
            names, texts = _mentioned(chat_environment().parse(source))
        except Exception as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._process = TemplateProcess(source)
        self._special_tokens = dict(special_tokens)
        self._tools_name = next((name for name in _TOOL_VARIABLES if name in names), None)
        self._names, self._texts = names, texts
        self.source = source
        self._tool_use = ChatTemplate(tool_use, special_tokens) if tool_use else None
        self.knows_tools = self._tools_name is not None
        self.knows_calls = "tool_calls" in texts
        self.knows_results = "tool" in texts

    @property
    def for_tools(self) -> ChatTemplate:
        """Template for conversations with tools: the model's other template if it has one, else
        this one."""
        return self._tool_use or self

    def reads(self, variable: str) -> bool:
        """Return whether the template reads ``variable``, either in the template for tools or in
        the one for other conversations."""
        return variable in self._names or variable in self.for_tools._names

    def mentions(self, text: str) -> bool:
        """Return whether the template has ``text`` as a key or a constant, either in the template
        for tools or in the one for other conversations."""
        return text in self._texts or text in self.for_tools._texts

    async def start(self) -> None:
        """Start the template process before the first rendering needs it.

        Raises ConfigError if the template does not compile, BatonError if no process starts.
        """
        await asyncio.wrap_future(self._process.start())
        if self._tool_use is not None:
            await self._tool_use.start()

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
        *,
        generation_prompt: bool = True,
    ) -> Future[str]:
        """Render the prompt's text of at most ``limit`` characters.

        ``more``: further variables of the template. Without ``generation_prompt`` the text does not
        begin the assistant's turn. The future raises the errors of ``TemplateProcess.render``:
        InvalidRequest if the template rejects the messages.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            **more,
            "messages": list(messages),
            "add_generation_prompt": generation_prompt,
            "tools": None,
            "documents": None,
        }
        if tools and self._tools_name:
            variables[self._tools_name] = list(tools)
        size = sum(len(message.get("content") or "") for message in messages)
        return self._process.render(variables, limit, size + _MESSAGE_CHARACTERS * len(messages))


def _mentioned(template: jinja2.nodes.Template) -> tuple[set[str], set[str]]:
    """Return the variables that a template reads, and the keys and constants in it."""
    names = {node.name for node in template.find_all(jinja2.nodes.Name) if node.ctx == "load"}
    texts = {node.attr for node in template.find_all(jinja2.nodes.Getattr)}
    constants = (node.value for node in template.find_all(jinja2.nodes.Const))
    return names, texts | {value for value in constants if isinstance(value, str)}


MAX_CPU_S = 5.0
"""Maximum CPU seconds of one rendering, and of compiling the template."""
MAX_MEMORY_BYTES = 1 << 30
"""Maximum address space of one rendering, and of compiling the template, in bytes. A rendering of
the largest body uses about 300 MiB."""
SHORT_CHARACTERS = 1 << 18
"""Maximum number of characters of a short conversation. Short ones have a process of their own, so
they never wait for longer ones."""


class TemplateProcess:
    """The processes that render a chat template: one for short and one for long conversations. Each
    is started when first used.

    Any thread may use this object. The processes end when it is no longer referenced, or with this
    process.
    """

    def __init__(self, source: str) -> None:
        """Prepare the processes for the template with the text ``source``. A process starts when it
        is first needed."""
        bounds = Bounds(MAX_CPU_S, MAX_MEMORY_BYTES, MAX_CPU_S, MAX_MEMORY_BYTES)
        self._sandbox = Sandbox("router.text.template_program", lambda: {"source": source}, bounds)
        self._short, self._long = (
            ThreadPoolExecutor(1, thread_name_prefix=f"chat-template-{name}")
            for name in ("short", "long")
        )

    def start(self) -> Future[None]:
        """Compile the template. The future raises ConfigError if it does not compile."""
        return self._short.submit(_start, self._sandbox)

    def render(self, variables: Mapping[str, Any], limit: int, size: int) -> Future[str]:
        """Render the template with ``variables`` to a text of at most ``limit`` characters.

        ``size``: the approximate number of characters of the conversation. The future raises
        InvalidRequest if the template refuses the variables, fails on them, or exceeds its bounds;
        DeadlineExceeded after ``baton.sandbox.sandbox.MAX_WAIT_S``; ConfigError if it does not
        compile; BatonError if no process can be started.
        """
        thread = self._short if size <= SHORT_CHARACTERS else self._long
        return thread.submit(_render, self._sandbox, {"variables": variables, "limit": limit})


def _start(sandbox: Sandbox) -> None:
    try:
        sandbox.start()
    except ProgramBroken as error:
        raise _does_not_compile(error) from None


def _render(sandbox: Sandbox, request: Mapping[str, Any]) -> str:
    try:
        answer = sandbox.ask(request)
    except ProgramBroken as error:
        raise _does_not_compile(error) from None
    except BoundExceeded as error:
        raise InvalidRequest(
            f"the model's chat template needs {error} for these messages", param="messages"
        ) from None
    if "refused" in answer:
        reason = f"the model's chat template refuses these messages: {answer['refused']}"
    elif "failed" in answer:
        reason = f"the model's chat template fails on these messages ({answer['failed']})"
    elif "long" in answer:
        reason = "the rendered messages are too long"
    else:
        return str(answer["text"])
    raise InvalidRequest(reason, param="messages")


def _does_not_compile(error: ProgramBroken) -> ConfigError:
    return ConfigError(f"the model's chat template does not compile: {error}")
