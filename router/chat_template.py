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
import jinja2.sandbox

from baton.errors import ConfigError, InvalidRequest


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


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_GenerationTag, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    functions: dict[str, Callable[..., Any]] = {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
    }
    environment.globals.update(functions)
    return environment


class ChatTemplate:
    """A compiled template, run in a sandbox. Raises ConfigError when it does not compile."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """``special_tokens`` are names that templates use, such as ``bos_token``."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        limit: int,
        more: Mapping[str, Any] = MappingProxyType({}),
        *,
        generation_prompt: bool = True,
    ) -> str:
        """The prompt's text, ready for the answer; at most ``limit`` characters.

        ``more`` are variables that the template may ask for; without ``generation_prompt`` the
        assistant's turn is not begun. Raises InvalidRequest when the template refuses the messages.
        """
        variables = {
            **self._special_tokens,
            **more,
            "messages": [dict(message) for message in messages],
            "add_generation_prompt": generation_prompt,
            "tools": None,
            "documents": None,
        }
        pieces: list[str] = []
        size = 0
        try:
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


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """The template of a model's folder; None when it has none. Raises ConfigError."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens)
    source = tokenizer_config.get("chat_template")
    if isinstance(source, list):
        source = next((entry["template"] for entry in source if entry["name"] == "default"), None)
    return ChatTemplate(source, special_tokens) if source else None
