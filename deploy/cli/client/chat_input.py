"""Questions from a terminal: lines that can be edited, over several lines, with a history."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

MAX_ENTRIES = 500
MAX_BYTES = 256 * 1024
"""What is kept of the history when a conversation begins."""


class QuestionInput:
    """Reads questions from the terminal that standard input is."""

    def __init__(self, history: History) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(),
            history=history,
        )

    def read(self) -> str:
        """The next question. Raises EOFError after Ctrl-D, and KeyboardInterrupt after Ctrl-C."""
        return self._session.prompt()


def history_file() -> Path:
    """$XDG_STATE_HOME/baton/chat_history, by default below ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "baton" / "chat_history"


def open_history(path: Path) -> History:
    """The questions that a file keeps, and those that will be added; the oldest ones go.

    Its owner alone can read the file. Where it cannot be written, the history lasts as long as
    the conversation.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return _Kept(path)


class _Kept(FileHistory):
    def store_string(self, string: str) -> None:
        # A full disk ends no conversation.
        with contextlib.suppress(OSError):
            super().store_string(string)


def _shorten(path: Path) -> None:
    """Keep the newest entries in a file that only its owner can read; make it if there is none."""
    newest: list[str] = []
    size = 0
    for entry in FileHistory(path).load_history_strings():
        size += len(entry.encode())
        if len(newest) == MAX_ENTRIES or size > MAX_BYTES:
            break
        newest.append(entry)
    fresh = path.with_suffix(f".{os.getpid()}")
    os.close(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600))
    kept = FileHistory(fresh)
    for entry in reversed(newest):
        kept.store_string(entry)
    fresh.replace(path)


@contextlib.contextmanager
def keys_held_back() -> Iterator[None]:
    """Inside, keys that are typed during an answer are not echoed into it; they wait for the next

    question.

    Ctrl-C still raises KeyboardInterrupt.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    held = termios.tcgetattr(terminal)
    # Without ICRNL Enter stays what it is to the next question, which it sends.
    held[0] &= ~termios.ICRNL
    held[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(terminal, termios.TCSADRAIN, held)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _key_bindings() -> KeyBindings:
    bindings = KeyBindings()

    @bindings.add("enter")
    def send(event: KeyPressEvent) -> None:
        event.current_buffer.validate_and_handle()

    @bindings.add("escape", "enter")
    @bindings.add("c-j")
    def begin_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return bindings
