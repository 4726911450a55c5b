"""Options that several commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from deploy.cli.options.option_group import takes


@dataclass(frozen=True, slots=True)
class Group:
    size: Annotated[int, typer.Option(min=1, help="How large.")] = 3
    name: Annotated[str, typer.Option("--called", envvar="GROUP_NAME", help="How called.")] = "x"


def make_app() -> typer.Typer:
    app = typer.Typer()

    @app.command()
    @takes(Group)
    def one(group: Group, own: Annotated[int, typer.Option(help="Its own.")]) -> None:
        """Shows all."""
        typer.echo(f"{group.size} {group.name} {own}")

    @app.command()
    @takes(Group)
    def other(group: Group) -> None:
        typer.echo(f"{group}")

    return app


@pytest.mark.parametrize(
    ("words", "environment", "said"),
    [
        (["one", "--own", "7"], {}, "3 x 7"),
        (["one", "--own", "7", "--size", "5", "--called", "y"], {}, "5 y 7"),
        (["one", "--own", "7"], {"GROUP_NAME": "z"}, "3 z 7"),
        (["other", "--size", "4"], {}, "Group(size=4, name='x')"),
    ],
)
def test_fields_are_options(words: list[str], environment: dict[str, str], said: str) -> None:
    result = CliRunner().invoke(make_app(), words, env=environment)
    assert result.exit_code == 0, result.output
    assert result.output.strip() == said


@pytest.mark.parametrize(
    "words", [["one"], ["one", "--own", "1", "--size", "0"], ["other", "--own", "1"]]
)
def test_what_is_wrong(words: list[str]) -> None:
    assert CliRunner().invoke(make_app(), words).exit_code == 2


def test_help_shows_the_command_s_own_options_first() -> None:
    text = CliRunner().invoke(make_app(), ["one", "--help"], env={"COLUMNS": "120"}).output
    assert "Shows all." in text
    assert text.index("--own") < text.index("--size") < text.index("--called")
