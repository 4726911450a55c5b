"""`baton chat` in a terminal and in a pipe: the real program, and a model that repeats."""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.deploy.parrot import DEADLINE_S, Parrot, said, served
from tests.support.e2e.cluster import BATON
from tests.support.terminal import ALT_ENTER, CTRL_C, CTRL_D, CTRL_J, ENTER, UP, Terminal

WORKERS = "prefill-3 → decode-4"
"""At the end of the line of figures, behind a whole answer."""


def is_begun(shown: str) -> bool:
    """Whether the answer is there, and not a part of the question alone: Ctrl-C would be typed."""
    return re.search(r"begun wait\s+begun", shown) is not None


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


@pytest.fixture
def address(parrot: Parrot) -> Iterator[str]:
    with served(parrot) as address:
        yield address


class Chats:
    """Starts `baton chat` with a history of its own."""

    def __init__(self, state: Path) -> None:
        self.history = state / "baton" / "chat_history"
        self._env = {"XDG_STATE_HOME": str(state)}

    def begin(self, *arguments: str, rows: int = 24) -> Terminal:
        return Terminal([BATON, "chat", *arguments], self._env, rows=rows)


@pytest.fixture
def chats(tmp_path: Path) -> Chats:
    return Chats(tmp_path)


def in_a_pipe(address: str, *arguments: str, typed: str = "") -> str:
    return subprocess.run(
        [BATON, "chat", "--grpc", address, *arguments],
        input=typed,
        capture_output=True,
        text=True,
        check=True,
        timeout=DEADLINE_S,
    ).stdout


def test_a_conversation(chats: Chats, address: str, parrot: Parrot) -> None:
    with chats.begin("--grpc", address) as terminal:
        terminal.wait_for(f"parrot at {address}")
        terminal.wait_for("/help lists the commands.")
        terminal.wait_for("\n>")
        terminal.type(f"a **bold** word{ENTER}")
        terminal.wait_for(WORKERS)
        assert "a bold word" in terminal.lines
        terminal.type(f"first{ALT_ENTER}second{CTRL_J}third{ENTER}")
        terminal.wait_for(WORKERS, 2)
        terminal.paste("pasted\nlines")
        terminal.type(ENTER)
        terminal.wait_for(WORKERS, 3)
        terminal.type(f"unsent{CTRL_C}")
        terminal.wait_for("Ctrl-D or /quit ends the conversation.")
        terminal.type(CTRL_D)
        assert terminal.wait_end() == 0
    questions = [content for role, content in said(parrot.requests[-1]) if role == "user"]
    assert questions == ["a **bold** word", "first\nsecond\nthird", "pasted\nlines"]


def test_ctrl_c_ends_an_answer_and_what_was_typed_meanwhile_is_kept(
    chats: Chats, address: str, parrot: Parrot
) -> None:
    with chats.begin("--grpc", address) as terminal:
        terminal.wait_for("\n>")
        terminal.type(f"begun wait{ENTER}")
        terminal.wait_until(is_begun)
        terminal.type(CTRL_C)
        terminal.wait_for("interrupted")
        assert parrot.cancelled.wait(DEADLINE_S)
        terminal.type(f"and on{ENTER}")
        terminal.wait_for(WORKERS)
        terminal.type(f"/quit{ENTER}")
        assert terminal.wait_end() == 0
    assert said(parrot.requests[-1])[1:] == [("assistant", "begun "), ("user", "and on")]


@pytest.mark.parametrize("typed", ["", f"begun wait{ENTER}"], ids=["prompt", "answer"])
def test_sigterm_leaves_the_terminal_as_it_was(chats: Chats, address: str, typed: str) -> None:
    with chats.begin("--grpc", address) as terminal:
        terminal.wait_for("\n>")
        terminal.type(typed)
        if typed:
            terminal.wait_until(is_begun)
        terminal.process.terminate()
        assert terminal.wait_end() == 128 + signal.SIGTERM
        assert terminal.echoes
        assert "Traceback" not in terminal.text


def test_the_history_outlives_the_conversation(chats: Chats, address: str, parrot: Parrot) -> None:
    for _ in range(2):
        with chats.begin("--grpc", address) as terminal:
            terminal.wait_for("\n>")
            if parrot.requests:
                terminal.type(UP)
                terminal.wait_for("> one")
                terminal.type(ENTER)
            else:
                terminal.type(f"one{CTRL_J}two{ENTER}")
            terminal.wait_for(WORKERS)
            terminal.type(CTRL_D)
            assert terminal.wait_end() == 0
    assert [said(request) for request in parrot.requests] == [[("user", "one\ntwo")]] * 2
    assert chats.history.stat().st_mode & 0o777 == 0o600


def test_commands(chats: Chats, address: str, parrot: Parrot) -> None:
    with chats.begin("--grpc", address) as terminal:
        terminal.wait_for("\n>")
        terminal.type(f"/help{ENTER}")
        terminal.wait_for("/retry        Ask the last question again.")
        terminal.type(f"/nothing{ENTER}")
        terminal.wait_for("unknown command /nothing")
        terminal.type(f"/retry{ENTER}")
        terminal.wait_for("There is no question yet.")
        terminal.type(f"/etc/hosts{ENTER}")
        terminal.wait_for(WORKERS)
        terminal.type(f"/system Be brief.{ENTER}")
        terminal.wait_for("The system prompt is set.")
        terminal.type(f"/new{ENTER}")
        terminal.wait_for("A new conversation.")
        terminal.type(f"one{ENTER}")
        terminal.wait_for(WORKERS, 2)
        terminal.type(f"/retry{ENTER}")
        terminal.wait_for(WORKERS, 3)
        terminal.type(f"/quit{ENTER}")
        assert terminal.wait_end() == 0
    first, *others = [said(request) for request in parrot.requests]
    assert first == [("user", "/etc/hosts")]
    assert others == [[("system", "Be brief."), ("user", "one")]] * 2


def has_ended(tries: int, text: str) -> bool:
    """Whether this number of questions has an answer or an error."""
    return text.count("/retry asks") + text.count(WORKERS) >= tries


def test_a_server_that_comes_back_answers_the_question_that_failed(chats: Chats) -> None:
    with served(Parrot()) as address:
        terminal = chats.begin("--grpc", address)
        terminal.wait_for("\n>")
    with terminal:
        terminal.type(f"anyone?{ENTER}")
        terminal.wait_for(f"no router answers at {address}")
        terminal.wait_for("/retry asks the question again.")
        parrot = Parrot()
        with served(parrot, int(address.rpartition(":")[2])):
            # The client connects again after a while.
            tries = 1
            while not parrot.requests:
                terminal.type(f"/retry{ENTER}")
                tries += 1
                terminal.wait_until(partial(has_ended, tries))
            terminal.wait_for(WORKERS)
            terminal.type(CTRL_D)
            assert terminal.wait_end() == 0
    assert said(parrot.requests[0]) == [("user", "anyone?")]


def test_an_answer_that_is_longer_than_the_screen_is_there_once(chats: Chats, address: str) -> None:
    items = "\n".join(f"{n}. item-{n};" for n in range(1, 60))
    question = f"Some:\n\n{items}\n\nThe end."
    with chats.begin("--grpc", address, question, rows=12) as terminal:
        assert terminal.wait_end() == 0
        shown = terminal.text
    assert [shown.count(f"item-{n};") for n in range(1, 60)] == [1] * 59, shown
    assert shown.count("The end.") == shown.count("Some:") == 1
    assert shown.index("item-59;") < shown.index("The end.") < shown.index(WORKERS)


def test_in_a_pipe_there_are_answers_alone(address: str) -> None:
    assert in_a_pipe(address, "a **bold** word") == "a **bold** word \n"
    assert in_a_pipe(address, typed="one\n\n/new\ntwo\n") == "one \n/new \ntwo \n"
