"""What deployments run, held against the real command line and the real configuration."""

from __future__ import annotations

from collections.abc import Sequence

import click
import typer.main

from baton.config import Config
from deploy.cli import app

CACHE_VARIABLE = "BATON_CACHE_DIR"


def parse(arguments: Sequence[str]) -> click.Context:
    """The context of the command that ``baton`` with these arguments would run; nothing is run.

    Raises click.UsageError where it takes no such arguments.
    """
    return _parse(typer.main.get_command(app), "baton", list(arguments), None)


def unknown_variables(names: Sequence[str]) -> list[str]:
    """Those of the variables of an environment that Baton would not read though they look so."""
    known = {f"BATON_{field.upper()}" for field in Config.model_fields} | {CACHE_VARIABLE}
    return [name for name in names if name.startswith("BATON_") and name not in known]


def _parse(
    command: click.Command, name: str, arguments: list[str], parent: click.Context | None
) -> click.Context:
    context = command.make_context(name, arguments, parent=parent)
    if not isinstance(command, click.Group):
        return context
    rest = [*context._protected_args, *context.args]
    found, chosen, left = command.resolve_command(context, rest)
    assert chosen is not None
    return _parse(chosen, found or "", left, context)
