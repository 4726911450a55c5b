"""A model's chat template: renders messages to the text form that the model was trained on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2.nodes

from baton.errors import ConfigError
from router.text.template_process import TemplateProcess
from router.text.template_program import chat_environment

MAX_SOURCE_CHARACTERS = 1 << 20
"""Maximum characters of a template."""
_MESSAGE_CHARACTERS = 64
"""Cost of a message besides its text, as characters of text."""
_TOOL_VARIABLES = ("tools", "xml_tools")
"""Names of the tools in templates; SmolLM3 uses the second."""


class ChatTemplate:
    """A template, rendered by a process of its own.

    ``knows_tools``: it writes tools into the prompt. ``knows_calls``: it writes the calls of
    earlier answers. ``knows_results``: it handles messages of the role ``tool``.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None
    ) -> None:
        """``special_tokens``: text by the names that templates use, such as ``bos_token``.

        ``tool_use`` is the source of the model's other template, for conversations with tools.
        Raises ConfigError if a template cannot be parsed.
        """
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ConfigError(
                f"the model's chat template has more than {MAX_SOURCE_CHARACTERS} characters"
            )
        try:
            # It is not compiled here: jinja2 would compute its constants without bounds.
            names, texts = _mentioned(chat_environment().parse(source))
        except Exception as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._process = TemplateProcess(source)
        self._special_tokens = dict(special_tokens)
        self._tools_name = next((name for name in _TOOL_VARIABLES if name in names), None)
        self.source = source
        self._tool_use = ChatTemplate(tool_use, special_tokens) if tool_use else None
        self.knows_tools = self._tools_name is not None
        self.knows_calls = "tool_calls" in texts
        self.knows_results = "tool" in texts

    @property
    def for_tools(self) -> ChatTemplate:
        """The template for conversations with tools."""
        return self._tool_use or self

    async def start(self) -> None:
        """Start the process before the first rendering needs it.

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
        """The prompt's text, ready for the answer; at most ``limit`` characters.

        ``more``: further variables of the template. Without ``generation_prompt`` the text does
        not begin the assistant's turn. The future raises the errors of ``TemplateProcess.render``:
        InvalidRequest if the template refuses the messages.
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
    """The variables that a template reads, and the keys and constants in it."""
    names = {node.name for node in template.find_all(jinja2.nodes.Name) if node.ctx == "load"}
    texts = {node.attr for node in template.find_all(jinja2.nodes.Getattr)}
    constants = (node.value for node in template.find_all(jinja2.nodes.Const))
    return names, texts | {value for value in constants if isinstance(value, str)}


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a model's folder; None if it has none. Raises ConfigError."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens)
    source = tokenizer_config.get("chat_template")
    tool_use = None
    if isinstance(source, list):
        sources = {entry["name"]: entry["template"] for entry in source}
        source, tool_use = sources.get("default"), sources.get("tool_use")
    return ChatTemplate(source, special_tokens, tool_use) if source else None
