"""Results on standard output: as a table for people, or as JSON for programs."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from deploy.cli.options.choices import OutputFormat

Output = Annotated[
    OutputFormat,
    typer.Option(
        "--output",
        "-o",
        help="Output format. docs/reference/command-line.md lists the JSON fields.",
    ),
]
_WIDEST = 10_000


def print_json(document: Any) -> None:
    """Print one JSON document."""
    typer.echo(json.dumps(document, indent=2, ensure_ascii=False))


def print_table(table: Table) -> None:
    """Print a table: as wide as the terminal, or with unbroken lines elsewhere."""
    console = Console()
    if not console.is_terminal:
        unbounded = console.options.update(max_width=_WIDEST)
        console.width = max(1, console.measure(table, options=unbounded).maximum)
    console.print(table)
