"""What commands write: tables that can be pasted, and files of figures."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from baton.errors import ConfigError

_WIDEST = 1000


def whole_table(*columns: str, title: str) -> Table:
    """A table drawn as Markdown; the first column is to the left, figures to the right."""
    table = Table(*columns, title=title, title_justify="left", box=box.MARKDOWN)
    for number, column in enumerate(table.columns):
        column.no_wrap = True
        column.justify = "right" if number else "left"
    return table


def print_whole(console: Console, table: Table) -> None:
    """As wide as the table is."""
    unbounded = console.options.update(max_width=_WIDEST)
    console.width = max(console.width, console.measure(table, options=unbounded).maximum)
    console.print(table)


def write_json(path: Path, text: str) -> None:
    """Raises ConfigError where it cannot be written."""
    try:
        path.write_text(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
