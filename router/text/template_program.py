"""The program of a chat template's process, started by router.text.chat_template.

It bounds its own time and memory. Standard input is a socket: the program reads one JSON document
per line, and writes one answer per line.

    {"source": "...", "cpu_s": 5, "memory_bytes": 9}    {"ready": true}, {"broken": "why"}
    {"variables": {...}, "limit": 9}                    {"text": "..."}, {"long": 9},
                                                        {"refused": "why"}, {"failed": "KeyError"}

It imports nothing from Baton, so that it starts fast.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import resource
import signal
import socket
from collections.abc import Callable, Iterator
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
    except Exception as error:
        # A template is a program with client input: it may fail in any way.
        return {"failed": type(error).__name__}
    return {"text": "".join(pieces)}


@contextlib.contextmanager
def _timed(cpu_s: float) -> Iterator[None]:
    """Limit the CPU time of the context's body. If it takes longer, the kernel ends the process
    with SIGPROF.

    Nothing else stops a single long operation of the interpreter, such as a power.
    """
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _bound_process(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


def _encoded(answer: dict[str, Any]) -> bytes:
    # Clients can send unpaired surrogates, which JSON allows and UTF-8 does not.
    return json.dumps(answer, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def main() -> None:
    """Answer the router's requests until it closes the socket."""
    # Ctrl-C reaches all processes of a terminal; this one ends with its standard input.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=0)
    lines = channel.makefile("rb")
    first = json.loads(lines.readline())
    cpu_s: float = first["cpu_s"]
    _bound_process(first["memory_bytes"])
    try:
        with _timed(cpu_s):
            template = chat_environment().from_string(first["source"])
    except Exception as error:
        # Python's own compiler also rejects some of the code that jinja2 generates.
        reason = str(error)[:_MAX_REASON_CHARACTERS] or type(error).__name__
        channel.sendall(_encoded({"broken": reason}))
        return
    channel.sendall(_encoded({"ready": True}))
    for line in lines:
        with _timed(cpu_s):
            request = json.loads(line.decode("utf-8", "surrogatepass"))
            answer = _encoded(_rendered(template, request["variables"], request["limit"]))
        channel.sendall(answer)


if __name__ == "__main__":
    main()
