"""A conversation in a terminal: questions, commands that begin with a slash, rendered answers."""

from __future__ import annotations

import re
from collections.abc import Callable

from rich.console import Console

from baton.errors import BatonError
from deploy.cli.client.chat import Chat
from deploy.cli.client.chat_input import QuestionInput
from deploy.cli.client.chat_markdown import MarkdownAnswer

HELP = """\
/new          Start a new conversation; the system prompt stays.
/system TEXT  Set the system prompt. Without TEXT: remove it.
/retry        Ask the last question again.
/quit         End the conversation, as Ctrl-D does.

Enter sends. Alt+Enter or Ctrl-J starts a new line. Ctrl-C ends an answer.
The arrow keys bring back earlier questions."""
_COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?", re.DOTALL)
"""A path such as /etc/hosts is none."""


class ChatTerminal:
    """Standard input and output are a terminal."""

    def __init__(
        self,
        chat: Chat,
        questions: QuestionInput,
        console: Console,
        complain: Callable[[str], None],
    ) -> None:
        """``complain`` shows an error."""
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
        """Converse until /quit or Ctrl-D."""
        while not self._ended:
            try:
                self._take(self._questions.read())
            except EOFError:
                return
            except KeyboardInterrupt:
                # At the prompt, or in the moment between an answer and the next prompt.
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
    """Ask, and show the answer and its figures; False when Ctrl-C ended it. Raises BatonError."""
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
