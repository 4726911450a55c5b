from __future__ import annotations

import io
import threading
from typing import Any

import pyte
import pytest
from rich.console import Console

from deploy.cli.client.chat_markdown import MarkdownAnswer, RenderedText, settled

ANSWER = """\
# A title

A paragraph of several words, some of them **bold**, that does not fit a line of the screen.
A line of its own.

1. One
2. Two

   with a paragraph
3. Three

```python
def add(a: int, b: int) -> int:

    return a + b
```

| name | value |
|------|-------|
| a    | 1     |

The <b>end</b>, by [a link](https://example.com/).
"""


class Screen:
    """A terminal that a console writes to."""

    def __init__(self, columns: int = 60, rows: int = 10) -> None:
        self._written = io.StringIO()
        self._size = columns, rows
        self.console = Console(
            file=self._written,
            force_terminal=True,
            width=columns,
            height=rows,
            color_system=None,
            legacy_windows=False,
        )

    @property
    def lines(self) -> list[str]:
        """All that can be seen, by scrolling back."""
        columns, rows = self._size
        screen = pyte.HistoryScreen(columns, rows, history=10_000)
        pyte.Stream(screen).feed(self._written.getvalue().replace("\n", "\r\n"))
        above = ["".join(line[n].data for n in range(columns)) for line in screen.history.top]
        return "\n".join(line.rstrip() for line in [*above, *screen.display]).rstrip().split("\n")


def shown(text: str, size: int = 7) -> list[str]:
    """What is left on a screen of an answer that comes in pieces of ``size`` characters."""
    screen = Screen()
    with MarkdownAnswer(screen.console) as answer:
        for start in range(0, len(text), size):
            answer.write(text[start : start + size])
            answer.refresh()
    return screen.lines


def rendered(text: str) -> list[str]:
    """The same, of a whole text."""
    screen = Screen()
    screen.console.print(RenderedText(text))
    return screen.lines


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_an_answer_in_pieces_looks_as_it_does_whole(size: int) -> None:
    assert shown(ANSWER, size) == rendered(ANSWER)


def test_an_answer_is_rendered() -> None:
    assert [line.strip() for line in shown(ANSWER)] == [
        "A title",
        "",
        "A paragraph of several words, some of them bold, that does",
        "not fit a line of the screen.",
        "A line of its own.",
        "",
        "1 One",
        "2 Two",
        "with a paragraph",
        "3 Three",
        "",
        "def add(a: int, b: int) -> int:",
        "",
        "return a + b",
        "",
        "name  value",
        "───────────",
        "a     1",
        "",
        "The <b>end</b>, by a link (https://example.com/).",
    ]


@pytest.mark.parametrize("rows", [3, 5, 10])
def test_what_is_longer_than_the_screen_is_there_once(rows: int) -> None:
    screen = Screen(rows=rows)
    with MarkdownAnswer(screen.console) as answer:
        for n in range(40):
            answer.write(f"- item-{n};\n")
            answer.refresh()
    expected = [f" • item-{n};" for n in range(40)]
    assert [line for line in screen.lines if line] == expected


def test_a_drawing_from_another_thread_waits_for_a_print(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    threads: list[threading.Thread] = []
    render_lines = screen.console.render_lines

    def interrupted(*arguments: Any, **options: Any) -> Any:
        """The first time, another thread draws in the middle of it, if it can."""
        if not threads:
            threads.append(threading.Thread(target=answer.refresh))
            threads[0].start()
            threads[0].join(0.1)
        return render_lines(*arguments, **options)

    with MarkdownAnswer(screen.console) as answer:
        answer.write("one\n\ntwo\n\nthree\nfour")
        answer.refresh()
        monkeypatch.setattr(screen.console, "render_lines", interrupted)
        answer.write("\n\nfive\n")
    threads[0].join()
    assert screen.lines == ["one", "", "two", "", "three", "four", "", "five"]


def test_what_would_control_the_terminal_is_not_shown() -> None:
    assert shown("a\x1b[2Jb\x07c\x9b1md\re") == ["a[2Jbc1mde"]


def test_a_second_ctrl_c_at_the_end_leaves_the_console_usable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    interrupted = MarkdownAnswer(screen.console)

    def join() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def ends() -> None:
        with interrupted as answer:
            answer.write("half an")

    monkeypatch.setattr(interrupted._refresher, "join", join)
    with pytest.raises(KeyboardInterrupt):
        ends()
    interrupted._refresher.join()
    assert not screen.console._live_stack
    with MarkdownAnswer(screen.console) as answer:
        answer.write("whole")
        answer.refresh()
    assert screen.lines == ["half an", "whole"]


def test_an_answer_that_fails_keeps_what_has_come() -> None:
    screen = Screen()

    def fail() -> None:
        with MarkdownAnswer(screen.console) as answer:
            answer.write("half an")
            raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        fail()
    assert screen.lines == ["half an"]


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("one", ""),
        ("one\n\n", ""),
        ("one\n\ntwo", ""),
        ("one\n\ntwo\n", "one\n"),
        ("one\n#", ""),
        ("one\n# two\n", "one"),
        ("one\n---\n", ""),
        ("- a\n\n- b\n", ""),
        ("```\na\n\nb\n", ""),
        ("```\na\n```\nb\n", "```\na\n```"),
    ],
)
def test_blocks_are_settled_that_no_further_text_can_change(text: str, complete: str) -> None:
    done, rest = settled(text)
    assert done == complete
    assert (f"{done}\n{rest}" if done else rest) == text
