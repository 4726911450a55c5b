"""Renders chat templates in processes whose time and memory the kernel bounds.

A template comes with a model, often from a hub, and is a program. jinja2's sandbox keeps it from
Python's internals, but lets it fill the memory or run forever, and a thread cannot be stopped. So
router.text.template_program runs it in a process of its own.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

from baton.errors import BatonError, ConfigError, DeadlineExceeded, InvalidRequest
from router.text import template_program

MAX_CPU_S = 5.0
"""Maximum CPU seconds of one rendering, and of compiling the template."""
MAX_MEMORY_BYTES = 1 << 30
"""Maximum address space of a process. Its own code uses 26 MiB, the largest body about 300."""
MAX_WAIT_S = 30.0
"""Maximum wait for an answer, seconds. It exceeds the CPU time: the machine may be busy."""
SHORT_CHARACTERS = 1 << 18
"""Conversations up to this many characters never wait for longer ones."""


class TemplateProcess:
    """Two processes, one for short and one for long conversations, each started when first used.

    Any thread may use it. The processes end when it is no longer referenced, or with this process.
    """

    def __init__(self, source: str) -> None:
        """``source``: the template."""
        self._short, self._long = _Lane(source), _Lane(source)

    def start(self) -> Future[None]:
        """Compile the template. The future raises ConfigError if it does not compile."""
        return self._short.start()

    def render(self, variables: Mapping[str, Any], limit: int, size: int) -> Future[str]:
        """Render the template with ``variables`` to a text of at most ``limit`` characters.

        ``size``: the conversation's approximate characters. The future raises InvalidRequest if
        the template refuses the variables, fails on them, or exceeds its bounds; DeadlineExceeded
        after ``MAX_WAIT_S``; ConfigError if it does not compile; BatonError if no process can be
        started.
        """
        lane = self._short if size <= SHORT_CHARACTERS else self._long
        return lane.render({"variables": variables, "limit": limit})


class _Lane:
    """One process and the thread that waits for it. Requests wait in the thread's queue."""

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
                    f"the model's chat template does not compile: it ended its process ({error})"
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
                    f"the model's chat template ends its process on these messages ({error})",
                    param="messages",
                ) from None
            # It was killed from outside: a new process may succeed.
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
    """The process ended instead of answering; the text says how."""

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
    """A process of ``template_program``, and the socket to it."""

    def __init__(self) -> None:
        """Start the process. Raises BatonError if it cannot be started."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                # Not by the event loop: uvloop forks, and gRPC's handlers of fork end some of the
                # children. subprocess uses vfork(2). What it would print may hold prompts.
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
        """Send a request, and wait for its answer.

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
        """The exit code. The socket is closed, so the process is ending."""
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
