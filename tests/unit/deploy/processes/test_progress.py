"""What `baton up` prints while it works."""

from __future__ import annotations

import io
import logging
import queue

import pytest
from rich.console import Console

from deploy.processes.progress import Progress


class Clock:
    """Records the lines of progress."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Lines(io.TextIOBase):
    """A pipe whose lines can be waited for."""

    def __init__(self) -> None:
        self.written: queue.Queue[str] = queue.Queue()

    def write(self, text: str) -> int:
        if text.strip():
            self.written.put(text.strip())
        return len(text)

    def next(self) -> str:
        return self.written.get(timeout=10.0)


def piped(clock: Clock, still_s: float = 3600.0) -> tuple[Progress, Lines]:
    lines = Lines()
    return Progress(Console(file=lines, width=200), clock, still_s), lines  # type: ignore[arg-type]


def test_a_pipe_gets_a_line_for_each_thing() -> None:
    clock = Clock()
    progress, lines = piped(clock)
    with progress.step("starting"):
        progress.detail("starting", "half done")
        clock.now = 2.5
    assert [lines.next() for _ in range(3)] == [
        "starting ...",
        "starting: half done",
        "starting: done in 2.5 s",
    ]


def test_a_long_step_says_in_a_pipe_that_it_goes_on() -> None:
    clock = Clock()
    progress, lines = piped(clock, still_s=0.01)
    with progress.step("compiling"):
        assert lines.next() == "compiling ..."
        clock.now = 10.0
        while (line := lines.next()) != "compiling (10 s) ...":
            assert line == "compiling (0 s) ..."
        progress.detail("compiling", "1 of 6 files are done")
        clock.now = 20.0
        while (line := lines.next()) != "compiling: 1 of 6 files are done (20 s) ...":
            assert line.startswith("compiling")


def test_a_step_that_fails_does_not_say_that_it_is_done() -> None:
    clock = Clock()
    progress, lines = piped(clock)
    step = progress.step("starting")
    step.__enter__()
    clock.now = 2.0
    error = OSError("full")
    assert not step.__exit__(OSError, error, None)
    assert lines.next() == "starting ..."
    assert lines.written.empty()
    assert progress.longest() == ""


def test_a_terminal_shows_all_that_runs_and_for_how_long() -> None:
    clock = Clock()
    screen = io.StringIO()
    progress = Progress(Console(file=screen, force_terminal=True, width=200), clock)
    with progress.step("one [fish]"):
        clock.now = 3.0
        with progress.step("two"):
            progress.detail("two", "half done")
            clock.now = 7.2
            assert progress.shown() == "one [fish] (7 s), two: half done (4 s)"
        assert progress.shown() == "one [fish] (7 s)"
    drawn = screen.getvalue()
    assert "one [fish] (7 s)" in drawn
    assert drawn.index("two: done in 4.2 s") < drawn.index("one [fish]: done in 7.2 s")


def test_the_longest_steps_are_known_in_the_end() -> None:
    clock = Clock()
    progress, _ = piped(clock)
    for name, took in (("a", 0.4), ("b", 2.0), ("c", 9.06), ("d", 1.0), ("e", 3.0)):
        with progress.step(name):
            clock.now += took
    assert progress.longest() == "c 9.1 s, e 3.0 s, b 2.0 s"


def test_without_a_console_all_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    progress = Progress(None, clock)
    assert progress.is_logged
    with caplog.at_level(logging.INFO):
        with progress.step("starting"):
            clock.now = 2.5
        progress.line()
        progress.line("decode-0 died", "yellow")
        progress.line("error: no room", "red")
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "starting ..."),
        ("INFO", "starting: done in 2.5 s"),
        ("WARNING", "decode-0 died"),
        ("ERROR", "error: no room"),
    ]
