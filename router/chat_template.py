"""A model's chat template: messages to the text that the model was trained on."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser

from baton.errors import ConfigError, InvalidRequest
from router.bounded_template import BoundedEnvironment, budgeted

MOST_SOURCE = 1 << 20
"""Characters of a template."""
MOST_WRITTEN = 16
"""A template may make so many times the text that it may give, on its way."""
_TOOL_VARIABLES = ("tools", "xml_tools")
"""Names by which templates know the tools; SmolLM3's is the second."""


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the answer for training; in serving its body is plain text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().astimezone().strftime(form)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which models have not seen.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _environment() -> BoundedEnvironment:
    environment = BoundedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.add_filter("tojson", _to_json)
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    return environment


class ChatTemplate:
    """A compiled template, run in a sandbox. Raises ConfigError when it does not compile.

    ``knows_tools``: it writes tools into the prompt. ``knows_calls``: also the calls of earlier
    answers. ``knows_results``: it has something to do for messages of the role ``tool``.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], tool_use: str | None = None
    ) -> None:
        """``special_tokens`` are names that templates use, such as ``bos_token``.

        ``tool_use`` is the source of the model's other template, for conversations with tools.
        """
        if len(source) > MOST_SOURCE:
            raise ConfigError(f"the model's chat template has more than {MOST_SOURCE} characters")
        environment = _environment()
        try:
            with budgeted(MOST_SOURCE):
                self._template = environment.from_string(source)
                names, texts = _mentioned(environment.parse(source))
        except Exception as error:
            # Python's own compiler refuses some of what jinja makes of a template, too.
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)
        self._tools_name = next((name for name in _TOOL_VARIABLES if name in names), None)
        self.source = source
        self.for_tools = ChatTemplate(tool_use, special_tokens) if tool_use else self
        self.knows_tools = self._tools_name is not None
        self.knows_calls = "tool_calls" in texts
        self.knows_results = "tool" in texts

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        limit: int,
        tools: Sequence[Mapping[str, Any]] | None = None,
        more: Mapping[str, Any] = MappingProxyType({}),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, ready for the answer; at most ``limit`` characters.

        ``more`` are variables that the template may ask for; without ``generation_prompt`` the
        assistant's turn is not begun. Raises InvalidRequest when the template refuses the messages.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            **more,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": generation_prompt,
            "tools": None,
            "documents": None,
        }
        if tools and self._tools_name:
            variables[self._tools_name] = list(tools)
        pieces: list[str] = []
        size = 0
        try:
            with budgeted(MOST_WRITTEN * limit):
                for piece in self._template.generate(variables):
                    pieces.append(piece)
                    size += len(piece)
                    if size > limit:
                        break
        except jinja2.TemplateError as error:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error.message or 'no reason'}",
                param="messages",
            ) from error
        except Exception as error:
            # A template is a program that runs on what the client sent: whatever fails in it is
            # no fault of the server's.
            raise InvalidRequest(
                f"the model's chat template fails on these messages ({type(error).__name__})",
                param="messages",
            ) from error
        if size > limit:
            raise InvalidRequest("the rendered messages are too long", param="messages")
        return "".join(pieces)


def _mentioned(template: jinja2.nodes.Template) -> tuple[set[str], set[str]]:
    """The variables that a template reads, and the keys and constants that stand in it."""
    names = {node.name for node in template.find_all(jinja2.nodes.Name) if node.ctx == "load"}
    texts = {node.attr for node in template.find_all(jinja2.nodes.Getattr)}
    constants = (node.value for node in template.find_all(jinja2.nodes.Const))
    return names, texts | {value for value in constants if isinstance(value, str)}


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a model's folder; None when it has none. Raises ConfigError."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens)
    source = tokenizer_config.get("chat_template")
    tool_use = None
    if isinstance(source, list):
        sources = {entry["name"]: entry["template"] for entry in source}
        source, tool_use = sources.get("default"), sources.get("tool_use")
    return ChatTemplate(source, special_tokens, tool_use) if source else None
