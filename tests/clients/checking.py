"""Runs the checks of other people's clients."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass

from rich.table import Table

from baton.errors import ConfigError
from tests.clients.environments import ClientProgram, install, read_table

CHECK_S = 1800.0
"""All checks of one client."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one check."""

    client: str
    check: str
    outcome: str
    """``pass``, ``missing`` or ``fail``."""
    why: str = ""


def chosen(names: str) -> list[ClientProgram]:
    """By names with commas, ``light`` or ``all``. Raises ConfigError."""
    table = read_table()
    if names == "all":
        return table
    if names == "light":
        return [program for program in table if not program.heavy]
    by_name = {program.name: program for program in table}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in by_name]
    if unknown:
        raise ConfigError(f"{unknown[0]} is none of {', '.join(by_name)}")
    return [by_name[name] for name in wanted]


def check(program: ClientProgram, url: str, model: str, model_path: str) -> list[Outcome]:
    """Run a client's checks; a client that cannot run them has failed."""
    variables = {"BATON_URL": url, "BATON_MODEL": model, "BATON_MODEL_PATH": model_path}
    try:
        install(program)
        done = subprocess.run(
            program.command(),
            env={**os.environ, **variables, "PYTHONPATH": ""},
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
    except ConfigError as error:
        return [Outcome(program.name, "install", "fail", error.message)]
    except (OSError, subprocess.TimeoutExpired) as error:
        return [Outcome(program.name, "run", "fail", str(error))]
    outcomes = [
        Outcome(program.name, told["check"], told["outcome"], told["why"])
        for told in map(json.loads, filter(_is_reported, done.stdout.splitlines()))
    ]
    if done.returncode or not outcomes:
        why = f"exit code {done.returncode}: {done.stderr[-300:]}"
        outcomes.append(Outcome(program.name, "run", "fail", why))
    return outcomes


def _is_reported(line: str) -> bool:
    return line.startswith('{"check":')


def draw(outcomes: list[Outcome]) -> Table:
    """One row a check."""
    table = Table("client", "check", "outcome", "why")
    for one in outcomes:
        table.add_row(one.client, one.check, one.outcome, one.why.replace("\n", " ")[:120])
    return table
