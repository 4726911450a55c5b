"""Markdown for the reference pages: text of the source code, tables, anchors and links."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = "docs/reference"
"""Folder of the reference pages; links are relative to it."""

_CODE = re.compile(r"`[^`]+`")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*[a-z]")
_PAGE = re.compile(r"\bdocs/([\w/.-]+\.md)(#[\w.-]+)?")


def text(source: str) -> str:
    """Convert text of the source code to one line of Markdown.

    Double backticks of reStructuredText become single ones, and names of pages become links.
    """
    plain = " ".join(source.replace("``", "`").split())
    parts = re.split(f"({_CODE.pattern})", plain)
    return "".join(part if _CODE.fullmatch(part) else _prose(part) for part in parts)


def _prose(part: str) -> str:
    escaped = part.replace("&", "&amp;").replace("<", "&lt;").replace("*", "\\*")
    return _PAGE.sub(_link, _OPTION.sub(r"`\g<0>`", escaped))


def _link(found: re.Match[str]) -> str:
    path, anchor = found[1], found[2] or ""
    name = Path(path).parent.name if path.endswith("/index.md") else Path(path).stem
    target = posixpath.relpath(f"docs/{path}", FOLDER)
    return f"[{name.replace('-', ' ').capitalize()}]({target}{anchor})"


def code(value: object) -> str:
    """Return a value as Markdown code, also within a table."""
    shown = str(value)
    if "|" not in shown:
        return f"`{shown}`"
    # A backslash before a pipe would be shown by some readers of Markdown.
    escaped = shown.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return f"<code>{escaped}</code>"


def codes(values: Iterable[object]) -> str:
    """Return values as Markdown code, with commas between them."""
    return ", ".join(map(code, values))


def cell(source: str) -> str:
    """Convert text of the source code to Markdown for a cell of a table."""
    parts = re.split(f"({_CODE.pattern})", text(source))
    return "".join(
        code(part[1:-1]) if _CODE.fullmatch(part) else part.replace("|", "&#124;") for part in parts
    )


def anchor(name: str) -> str:
    """Return an HTML anchor with the name ``name``, for text without a heading. The link ``#name``
    leads to it."""
    return f'<a id="{name}"></a>'


def option_place(command: str, flag: str) -> str:
    """Return the anchor of a command's option, such as ``baton-serve--http``."""
    return f"{command.replace(' ', '-')}{flag}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table. Cells must be Markdown already. Columns without any text are left
    out."""
    body = [tuple(row) for row in rows]
    used = [place for place, _ in enumerate(head) if any(row[place] for row in body)]
    lines = [[head[place] for place in used], ["---"] * len(used)]
    lines += [[row[place] for place in used] for row in body]
    return "\n".join(re.sub(r" +", " ", f"| {' | '.join(line)} |") for line in lines)


def made_from(source: str) -> str:
    """Return the sentence with which a page says from which source it is made."""
    return f"This page is made from {source} by `make reference`; a test keeps the two equal."
