"""Tables that can be pasted: never folded, however narrow the terminal is."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

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
