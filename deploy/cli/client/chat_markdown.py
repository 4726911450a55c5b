"""Renders an answer in a terminal as Markdown, while it arrives.

A complete block of Markdown (a paragraph, a list, a piece of code) is printed once and stays. Only
the open block is drawn again, and only as much of it as the screen can hold: a terminal cannot
redraw what it has scrolled away.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Self

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown
from rich.segment import Segment
from rich.spinner import Spinner

_REFRESH_S = 0.1
"""Interval in seconds at which the last, incomplete block of the answer is drawn again."""
_CODE_THEME = "ansi_dark"
"""Color theme of code blocks. It uses the terminal's own palette and background."""
# HTML is shown as plain text.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
_CONTROLS = dict.fromkeys({*range(0x20), *range(0x7F, 0xA0)} - {ord("\n"), ord("\t")})
"""Characters that would control the terminal. They are not shown."""


class MarkdownAnswer:
    """A context manager whose ``write`` shows the pieces of one answer.

    When the context ends, the whole answer has been shown.
    """

    def __init__(self, console: Console) -> None:
        """``console`` must be attached to a terminal."""
        self._console = console
        self._open = _OpenBlock()
        self._live = Live(
            self._open,
            console=console,
            # The refresh thread and a print from another thread could both draw from the same old
            # position.
            auto_refresh=False,
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._drawing = threading.Lock()
        self._ended = threading.Event()
        self._refresher = threading.Thread(target=self._refresh_often, daemon=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._refresher.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        try:
            self._refresher.join()
        finally:
            # A second Ctrl-C arrives here. A Live that is not stopped would stay on the console.
            self._live.stop()
            self._print(self._open.text)

    def write(self, text: str) -> None:
        """Show a piece of the answer's text."""
        text = text.translate(_CONTROLS)
        with self._drawing:
            self._open.text += text
            if "\n" in text:
                complete, self._open.text = settled(self._open.text)
                self._print(complete)

    def refresh(self) -> None:
        """Draw the text that was written so far now, instead of at the next refresh."""
        with self._drawing:
            self._live.refresh()

    def _refresh_often(self) -> None:
        while not self._ended.wait(_REFRESH_S):
            self.refresh()

    def _print(self, text: str) -> None:
        if not text.strip():
            return
        if self._open.follows_others:
            self._console.line()
        self._open.follows_others = True
        self._console.print(RenderedText(text))


class RenderedText:
    """Renders a Markdown text, with a blank line between two blocks and none before the first or
    after the last.

    Line breaks stay as they are, and the addresses of links are visible.
    """

    def __init__(self, text: str) -> None:
        self._blocks = [_markdown(block) for block in _blocks(_PARSER.parse(text))]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for number, block in enumerate(self._blocks):
            if number:
                yield Segment.line()
            for line in _without_blank_ends(console.render_lines(block, options, pad=False)):
                yield from line
                yield Segment.line()


class _OpenBlock:
    """Renders the last, incomplete block of an answer, as much of it as the screen can hold. Before
    the first text it renders a spinner."""

    def __init__(self) -> None:
        self.text = ""
        self.follows_others = False
        self._spinner = Spinner("dots", style="dim")

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text
        if not text.strip():
            if not self.follows_others:
                yield self._spinner
            return
        lines = console.render_lines(RenderedText(text), options, pad=False)
        if self.follows_others:
            lines.insert(0, [])
        for line in lines[-max(1, console.height - 2) :]:
            yield from line
            yield Segment.line()


def settled(text: str) -> tuple[str, str]:
    """Split an unfinished Markdown text before its last block. Further text cannot change the
    blocks before that.

    An incomplete line starts no block, since its next character may change the type of the block.
    """
    complete = text[: text.rfind("\n") + 1]
    starts = [token.map[0] for token in _PARSER.parse(complete) if token.level == 0 and token.map]
    if len(starts) < 2:
        return "", text
    lines = text.split("\n")
    return "\n".join(lines[: starts[-1]]), "\n".join(lines[starts[-1] :])


def _blocks(tokens: Sequence[Token]) -> Iterator[list[Token]]:
    """Yield the Markdown tokens of each block."""
    block = []
    for token in tokens:
        block.append(token)
        if token.level == 0 and token.nesting <= 0:
            yield block
            block = []


def _markdown(block: list[Token]) -> Markdown:
    shown = Markdown("", code_theme=_CODE_THEME, hyperlinks=False)
    shown.parsed = block
    for token in block:
        for child in token.children or ():
            if child.type == "softbreak":
                child.type = "hardbreak"
    return shown


def _without_blank_ends(lines: list[list[Segment]]) -> list[list[Segment]]:
    filled = [n for n, line in enumerate(lines) if any(part.text.strip() for part in line)]
    return lines[filled[0] : filled[-1] + 1] if filled else []
