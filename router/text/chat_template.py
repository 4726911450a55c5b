"""A model's chat template: renders messages to the text form that the model was trained on.

A template is a program that comes with a model, often from a hub. jinja2's sandbox keeps it from
Python's internals, but lets it fill the memory or run forever, and a thread cannot be stopped. So
router.text.template_program runs it in a process whose time and memory the kernel bounds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import IO, Any

import jinja2.nodes

from baton.errors import BatonError, ConfigError, DeadlineExceeded, InvalidRequest
from router.text import template_program
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
    ``joins_arguments``: it concatenates the arguments of calls with text, so the arguments must be
    text.
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
            parsed = chat_environment().parse(source)
            names, texts = _mentioned(parsed)
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
        self.joins_arguments = _joins(parsed, "arguments")

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


def _joins(template: jinja2.nodes.Template, key: str) -> bool:
    """Return whether a template concatenates a value named ``key`` with text, unconverted."""
    nodes = (jinja2.nodes.Add, jinja2.nodes.Concat)
    parts = [part for node in template.find_all(nodes) for part in node.iter_child_nodes()]
    items = [part.arg for part in parts if isinstance(part, jinja2.nodes.Getitem)]
    names = [part.attr for part in parts if isinstance(part, jinja2.nodes.Getattr)]
    constants = [item.value for item in items if isinstance(item, jinja2.nodes.Const)]
    return key in names or key in constants


def load_chat_template(
    folder: Path, tokenizer_config: Mapping[str, Any], special_tokens: Mapping[str, str]
) -> ChatTemplate | None:
    """Load the template of a model's folder; None if it has none. Raises ConfigError."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return ChatTemplate(file.read_text(encoding="utf-8"), special_tokens)
    source = tokenizer_config.get("chat_template")
    tool_use = None
    if isinstance(source, list):
        sources = {entry["name"]: entry["template"] for entry in source}
        source, tool_use = sources.get("default"), sources.get("tool_use")
    return ChatTemplate(source, special_tokens, tool_use) if source else None


MAX_CPU_S = 5.0
"""Maximum CPU seconds of one rendering, and of compiling the template."""
MAX_MEMORY_BYTES = 1 << 30
"""Maximum address space of a template process, in bytes. The process's own code uses 26 MiB, and a
rendering of the largest body about 300 MiB."""
MAX_WAIT_S = 30.0
"""Maximum time to wait for a rendering, in seconds. It exceeds ``MAX_CPU_S``, since the machine may
be busy."""
SHORT_CHARACTERS = 1 << 18
"""Maximum number of characters of a short conversation. Short ones have a process of their own, so
they never wait for longer ones."""


class TemplateProcess:
    """Two processes that render a chat template: one for short and one for long conversations. Each
    is started when first used.

    Any thread may use this object. The processes end when it is no longer referenced, or with this
    process.
    """

    def __init__(self, source: str) -> None:
        """Prepare the processes for the template with the text ``source``. A process starts when it
        is first needed."""
        self._short, self._long = _Lane(source), _Lane(source)

    def start(self) -> Future[None]:
        """Compile the template. The future raises ConfigError if it does not compile."""
        return self._short.start()

    def render(self, variables: Mapping[str, Any], limit: int, size: int) -> Future[str]:
        """Render the template with ``variables`` to a text of at most ``limit`` characters.

        ``size``: the approximate number of characters of the conversation. The future raises
        InvalidRequest if the template refuses the variables, fails on them, or exceeds its bounds;
        DeadlineExceeded after ``MAX_WAIT_S``; ConfigError if it does not compile; BatonError if no
        process can be started.
        """
        lane = self._short if size <= SHORT_CHARACTERS else self._long
        return lane.render({"variables": variables, "limit": limit})


class _Lane:
    """One template process, and the thread that sends requests to it and waits for its answers.
    Further requests wait in the thread's queue."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="chat-template")
        self._child: _Child | None = None

    def start(self) -> Future[None]:
        return self._thread.submit(self._start)

    def render(self, request: Mapping[str, Any]) -> Future[str]:
        return self._thread.submit(self._render, request)

    def _start(self) -> None:
        self._running()

    def _running(self) -> _Child:
        if self._child is None or self._child.has_ended:
            child = _Child()
            try:
                answer = child.ask(
                    {
                        "source": self._source,
                        "cpu_s": MAX_CPU_S,
                        "memory_bytes": MAX_MEMORY_BYTES,
                    }
                )
            except _ChildEnded as error:
                raise ConfigError(
                    f"the model's chat template does not compile: its process ended ({error})"
                ) from None
            if "broken" in answer:
                raise ConfigError(f"the model's chat template does not compile: {answer['broken']}")
            self._child = child
        return self._child

    def _render(self, request: Mapping[str, Any]) -> str:
        try:
            answer = self._running().ask(request)
        except _ChildEnded as error:
            if error.by_template:
                raise InvalidRequest(
                    f"the model's chat template ended its process on these messages ({error})",
                    param="messages",
                ) from None
            # The process was killed from outside: a new one may succeed.
            answer = self._asked_again(request)
        if "refused" in answer:
            reason = f"the model's chat template refuses these messages: {answer['refused']}"
        elif "failed" in answer:
            reason = f"the model's chat template fails on these messages ({answer['failed']})"
        elif "long" in answer:
            reason = "the rendered messages are too long"
        else:
            return str(answer["text"])
        raise InvalidRequest(reason, param="messages")

    def _asked_again(self, request: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return self._running().ask(request)
        except _ChildEnded as error:
            raise BatonError(f"the process of the chat template ended ({error})") from None


class _ChildEnded(Exception):
    """Raised because the template process ended instead of answering. The message gives the
    reason."""

    def __init__(self, code: int) -> None:
        by_time = code == -signal.SIGPROF
        how = f"more than {MAX_CPU_S:g} s" if by_time else _signal_name(code)
        super().__init__(how)
        self.by_template = code not in (-signal.SIGKILL, -signal.SIGTERM)


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


class _Child:
    """A template process, which runs ``template_program``, and the socket to it."""

    def __init__(self) -> None:
        """Start a template process. Raises BatonError if the process cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # Do not start it through the event loop: uvloop forks, and gRPC's fork handlers end
                # some of the children. subprocess uses vfork(2). Its output may contain prompts, so
                # drop it.
                self._process = subprocess.Popen(  # noqa: S603 - Baton's own program
                    [sys.executable, "-P", template_program.__file__],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
        except OSError as error:
            ours.close()
            raise BatonError(
                f"the process of the chat template cannot be started: {error}"
            ) from error
        self._socket, self._lines = ours, ours.makefile("rb")
        self._end = weakref.finalize(self, _end, self._process, self._socket, self._lines)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request to the template process, and wait for the answer.

        Raises _ChildEnded, and DeadlineExceeded after killing the process.
        """
        text = json.dumps(request, ensure_ascii=False, default=dict)
        self._socket.settimeout(MAX_WAIT_S)
        try:
            self._socket.sendall(text.encode("utf-8", "surrogatepass") + b"\n")
            line = self._lines.readline()
        except TimeoutError:
            self._end()
            raise DeadlineExceeded(
                f"the chat template was not rendered after {MAX_WAIT_S:.0f} s: this machine is"
                " overloaded"
            ) from None
        except OSError:
            line = b""
        if not line.endswith(b"\n"):
            raise _ChildEnded(self._code())
        answer: dict[str, Any] = json.loads(line.decode("utf-8", "surrogatepass"))
        return answer

    def _code(self) -> int:
        """Exit code of the template process. Read it after the process has closed its end of the
        socket: the process has ended or is ending."""
        try:
            return self._process.wait(MAX_WAIT_S)
        except subprocess.TimeoutExpired:
            self._end()
            return -signal.SIGKILL


def _end(process: subprocess.Popen[bytes], channel: socket.socket, lines: IO[bytes]) -> None:
    process.kill()
    process.wait()
    lines.close()
    channel.close()
