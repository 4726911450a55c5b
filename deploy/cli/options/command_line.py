"""Common parts of `baton`'s commands: options, and error messages."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from deploy.cli.options.exit_codes import ExitCode

DEFAULT_HTTP = "127.0.0.1:8000"
DEFAULT_GRPC = "127.0.0.1:8001"
DEFAULT_MODEL = "smollm2-135m-instruct"
MAX_WORKERS = 1024
INTERRUPTED = ExitCode.INTERRUPTED
CONNECTION = "Connection"
"""The panel of help with the options that choose a cluster and reach it. It comes last."""

Http = Annotated[
    str | None,
    typer.Option(
        metavar="HOST:PORT",
        help="The router's HTTP address. Default: that of your cluster on this machine.",
        rich_help_panel=CONNECTION,
    ),
]
ApiKey = Annotated[
    str,
    typer.Option(
        envvar="BATON_API_KEY",
        help="API key, if the cluster requires one.",
        rich_help_panel=CONNECTION,
    ),
]
Model = Annotated[str, typer.Option(metavar="MODEL", help="Model, as for `baton serve`.")]
Figures = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write the results to FILE as JSON.")
]


def names_in(text: str) -> tuple[str, ...]:
    """Return the names of a comma-separated list."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def counts_in(text: str) -> tuple[int, ...]:
    """Return the integers of a comma-separated list; ends the command for anything else."""
    try:
        return tuple(int(name) for name in names_in(text))
    except ValueError:
        fail(f"expected comma-separated integers such as 1,8,32; got {text!r}", code=ExitCode.USAGE)


def say(text: str) -> None:
    """Print one line of progress to standard error: standard output has only results."""
    typer.echo(text, err=True)


def complain(*lines: str) -> None:
    """Print an error message of one or more lines, and continue."""
    for line in lines:
        typer.secho(f"error: {line}", fg=typer.colors.RED, err=True)


def fail(*lines: str, code: ExitCode = ExitCode.FAILED) -> NoReturn:
    """Print an error message of one or more lines, and end the command with ``code``."""
    complain(*lines)
    raise typer.Exit(code)


def not_a_router(address: str) -> str:
    """Return the message for a server at ``address`` that does not answer like a router."""
    return f"{address} is not a Baton router, or has another version"


@contextmanager
def clear_errors() -> Iterator[None]:
    """Run the code within; if it raises BatonError, end the command with exit code 1 and the
    error's message."""
    from baton.errors import BatonError  # noqa: PLC0415

    try:
        yield
    except BatonError as error:
        fail(error.message)


@contextmanager
def clear_ends() -> Iterator[None]:
    """Handle errors like ``clear_errors``; Ctrl-C ends the command quietly, with exit code 130."""
    try:
        with clear_errors():
            yield
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
