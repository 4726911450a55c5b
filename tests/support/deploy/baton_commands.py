"""What deployments run, held against the real command line and the real configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import typer.main
from typer.core import TyperGroup

from baton.config.cluster import Config
from baton.config.tls import TlsConfig
from deploy.cli.main import app

CACHE_VARIABLE = "BATON_CACHE_DIR"


@dataclass(frozen=True, slots=True)
class Parsed:
    """A command of ``baton``, and what it would be given."""

    name: str
    parameters: dict[str, Any]


def parse(arguments: Sequence[str]) -> Parsed:
    """What ``baton`` with these arguments would run; nothing is run.

    Raises a usage error of the parser where it takes no such arguments.
    """
    command: Any = typer.main.get_command(app)
    name: str = "baton"
    context = command.make_context(name, list(arguments))
    while isinstance(command, TyperGroup):
        rest = [*context._protected_args, *context.args]
        name, command, left = command.resolve_command(context, rest)  # type: ignore[assignment]
        context = command.make_context(name, left, parent=context)
    return Parsed(name, dict(context.params))


def unknown_variables(names: Sequence[str]) -> list[str]:
    """Those of the variables of an environment that Baton would not read though they look so."""
    known = {f"BATON_{field.upper()}" for field in Config.model_fields} | {CACHE_VARIABLE}
    known |= {f"BATON_TLS__{field.upper()}" for field in TlsConfig.model_fields}
    return [name for name in names if name.startswith("BATON_") and name not in known]
