"""A conversation in a terminal: questions, commands that begin with a slash, rendered answers."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from rich.console import Console

from baton.errors import BatonError
from deploy.cli.client.chat import Chat
from deploy.cli.client.chat_markdown import MarkdownAnswer

HELP = """\
/new          Start a new conversation; the system prompt stays.
/system TEXT  Set the system prompt. Without TEXT: remove it.
/retry        Ask the last question again.
/quit         End the conversation, as Ctrl-D does.

Enter sends. Alt+Enter or Ctrl-J starts a new line. Ctrl-C ends an answer.
The arrow keys bring back earlier questions."""
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
"""Pattern of a chat command such as /quit. A path such as /etc/hosts does not match."""
MAX_ENTRIES = 500
MAX_BYTES = 256 * 1024
"""Maximum size of the history file when a conversation starts, in bytes."""


class ChatTerminal:
    """Runs a conversation. Standard input and output must be a terminal."""

    def __init__(
        self,
        chat: Chat,
        questions: QuestionInput,
        console: Console,
        complain: Callable[[str], None],
    ) -> None:
        """``complain`` shows an error message to the user."""
        self._chat = chat
        self._questions = questions
        self._console = console
        self._complain = complain
        self._commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self._say(HELP),
            "new": self._new,
            "quit": self._quit,
            "retry": self._retry,
            "system": self._system,
        }
        self._ended = False

    def run(self) -> None:
        """Read questions and show answers until /quit or Ctrl-D."""
        while not self._ended:
            try:
                self._take(self._questions.read())
            except EOFError:
                return
            except KeyboardInterrupt:
                # Ctrl-C at the prompt, or between an answer and the next prompt.
                self._say("Ctrl-D or /quit ends the conversation.")

    def _take(self, text: str) -> None:
        command = _COMMAND.fullmatch(text.rstrip())
        if command is None:
            if text.strip():
                self._ask(text)
            return
        name, argument = command.groups("")
        action = self._commands.get(name)
        if action is None:
            self._complain(
                f"unknown command /{name}: /help lists the commands; a space before the slash"
                " sends it as a question"
            )
        else:
            action(argument.strip())

    def _ask(self, question: str) -> None:
        try:
            show_answer(self._chat, question, self._console)
        except BatonError as error:
            self._complain(error.message)
            self._say("/retry asks the question again.")

    def _new(self, _: str) -> None:
        self._chat.clear()
        self._say("A new conversation.")

    def _quit(self, _: str) -> None:
        self._ended = True

    def _retry(self, _: str) -> None:
        if question := self._chat.take_back():
            self._ask(question)
        else:
            self._say("There is no question yet.")

    def _system(self, prompt: str) -> None:
        self._chat.system = prompt
        self._say("The system prompt is set." if prompt else "There is no system prompt now.")

    def _say(self, text: str) -> None:
        _note(self._console, text)


def show_answer(chat: Chat, question: str, console: Console) -> bool:
    """Ask the question, and show the answer and its figures. Returns False if Ctrl-C ended the
    answer. Raises BatonError."""
    with MarkdownAnswer(console) as shown:
        answer = chat.ask(question, shown.write)
    _note(console, answer.figures)
    if answer.forgotten:
        _note(
            console,
            f"The context is full: the oldest {answer.forgotten} questions are forgotten."
            " /new starts a new conversation.",
        )
    return not answer.interrupted


def _note(console: Console, text: str) -> None:
    console.print(text, style="dim", markup=False, highlight=False)


class QuestionInput:
    """Reads questions from standard input, which must be a terminal."""

    def __init__(self, history: History) -> None:
        self._session: PromptSession[str] = PromptSession(
            "> ",
            multiline=True,
            prompt_continuation="  ",
            key_bindings=_key_bindings(),
            history=history,
        )

    def read(self) -> str:
        """Read the next question.

        Raises EOFError after Ctrl-D, and KeyboardInterrupt after Ctrl-C.
        """
        return self._session.prompt()


def history_file() -> Path:
    """Return $XDG_STATE_HOME/baton/chat_history, by default in ~/.local/state."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "baton" / "chat_history"


def open_history(path: Path) -> History:
    """Open the history of questions in a file, and drop its oldest entries.

    Only the file's owner can read it. If the file cannot be written, the history is kept in memory.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _shorten(path)
    except OSError:
        return InMemoryHistory()
    return _Kept(path)


class _Kept(FileHistory):
    def store_string(self, string: str) -> None:
        # A full disk must not end the conversation.
        with contextlib.suppress(OSError):
            super().store_string(string)


def _shorten(path: Path) -> None:
    """Keep only the newest entries in a history file that only its owner can read; make the file if
    there is none."""
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
    """Turn off the terminal's echo, so that keys typed during an answer do not appear in it.

    The keys are input of the next question. Ctrl-C still raises KeyboardInterrupt.
    """
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    held = termios.tcgetattr(terminal)
    # Without ICRNL, Enter reaches the next question unchanged, and sends it.
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
