"""Makes command lines for benchmarks that run as modules: ``python -m
loadtest.cluster.index_bench``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from baton.errors import BatonError

_INTERRUPTED = 130
"""Exit code of a command that Ctrl-C ended. Shells use the same number."""

ModelFolder = Annotated[
    Path,
    typer.Option(
        "--model",
        metavar="FOLDER",
        exists=True,
        file_okay=False,
        resolve_path=True,
        help="Model folder. `baton model pull` prints that of the demo model.",
    ),
]
Figures = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results to FILE as JSON.")
]


def bench_app(command: Callable[..., None]) -> typer.Typer:
    """Return a program with one command, whose options are the parameters of ``command``.

    A BatonError ends the program with its message and exit code 1, Ctrl-C with exit code 130.
    """

    @functools.wraps(command)
    def run(**options: object) -> None:
        try:
            command(**options)
        except BatonError as error:
            typer.secho(f"error: {error.message}", fg=typer.colors.RED, err=True)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            raise typer.Exit(_INTERRUPTED) from None

    # Plain text keeps messages in one piece; a box would break their lines.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(run)
    return app


def say(text: str) -> None:
    """Print a line of progress to standard error: standard output has only the results."""
    typer.echo(text, err=True)


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def counts_in(text: str) -> tuple[int, ...]:
    """Return the integers of a comma-separated list. Raises ``typer.BadParameter`` if an item is no
    integer.
    """
    try:
        return tuple(int(name) for name in names_in(text))
    except ValueError:
        raise typer.BadParameter(
            f"expected comma-separated integers such as 1,8,32; got {text!r}"
        ) from None
