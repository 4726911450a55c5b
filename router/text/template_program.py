"""The program that renders a chat template, in a process of baton.sandbox.

Its setup is ``{"source": "..."}``. Requests and answers:

    {"variables": {...}, "limit": 9}    {"text": "..."}, {"long": 9}, {"refused": "why"},
                                        {"failed": "KeyError"}

It imports nothing from Baton, so that it starts fast.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

_MAX_REASON_CHARACTERS = 1000


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks the answer for training. In serving its body is plain text."""

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
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def chat_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """Create the environment that chat templates expect, as in Hugging Face transformers."""
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


def _rendered(
    template: jinja2.Template, variables: dict[str, Any], limit: int
) -> dict[str, str | int]:
    """Render the template to at most ``limit`` characters. Return the answer for the router: the
    text, or the reason why there is no text."""
    pieces: list[str] = []
    size = 0
    try:
        for piece in template.generate(variables):
            pieces.append(piece)
            size += len(piece)
            if size > limit:
                return {"long": limit}
    except jinja2.TemplateError as error:
        return {"refused": str(error.message or "no reason")[:_MAX_REASON_CHARACTERS]}
    except MemoryError:
        raise
    except Exception as error:
        # A template is a program with client input: it may fail in any way.
        return {"failed": type(error).__name__}
    return {"text": "".join(pieces)}


def prepare(setup: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Compile the template. Raises any error: Python's own compiler also rejects some of the code
    that jinja2 generates."""
    template = chat_environment().from_string(setup["source"])
    return lambda request: _rendered(template, request["variables"], request["limit"])
