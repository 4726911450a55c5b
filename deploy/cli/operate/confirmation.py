"""Asking before a command changes a running cluster."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from deploy.cli.options.command_line import fail
from deploy.cli.options.exit_codes import ExitCode

Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would happen, and change nothing.")
]


def confirm(question: str, *, yes: bool) -> None:
    """Return if the user agrees; otherwise end the command with ``ExitCode.REFUSED``.

    ``question`` has no question mark. Without a terminal, a script must give ``yes``.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        fail(
            f"not confirmed: {question}",
            "there is no terminal to ask on, so nothing was changed: give --yes",
            code=ExitCode.REFUSED,
        )
    try:
        agreed = typer.confirm(f"{question}?", err=True)
    except typer.Abort:
        typer.echo(err=True)
        agreed = False
    if not agreed:
        fail("not confirmed: nothing was changed", code=ExitCode.REFUSED)
