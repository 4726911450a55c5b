"""The help of every command, as a user sees it."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import typer.main
from typer.core import TyperGroup, TyperOption
from typer.testing import CliRunner

from baton.config.choices import Scope
from deploy.cli.main import app
from deploy.cli.options import choices
from loadtest.generator import load_settings
from loadtest.generator.targets import openai_target
from tests.support.deploy.baton_commands import parse

NOT_WORDS = (
    "apart",
    "authority",
    "front",
    "fronts",
    "likeliest",
    "nobody",
    "somebody",
    "evener",
    "oftener",
    "whoever",
    "whose place",
)
"""Private vocabulary; CONTRIBUTING.md says what the words are."""


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, command
    if isinstance(command, TyperGroup):
        for name, child in command.commands.items():
            yield from commands(child, (*path, name))


ALL = dict(commands(typer.main.get_command(app)))


def help_of(path: tuple[str, ...]) -> str:
    result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_is_complete_and_plain(path: tuple[str, ...]) -> None:
    text = help_of(path)
    for wrong in ("<bool>", "None", "[default: ]"):
        assert wrong not in text
    prose = re.sub(r"--[a-z-]+", "", text.lower())
    words = set(re.findall(r"[a-z]+", prose))
    assert words.isdisjoint(NOT_WORDS), words & set(NOT_WORDS)
    for one in ALL[path].params:
        assert one.help, f"{' '.join(path)}: {one.name} has no help"
        if isinstance(one, TyperOption) and re.search(r"[Dd]efault:", one.help):
            assert one.default in (None, "") or one.show_default is False, (path, one.name)


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_is_one_line_in_its_panel(path: tuple[str, ...]) -> None:
    """Of 80 columns."""
    if not path:
        return
    first = (ALL[path].help or "").split("\n\n")[0]
    assert 0 < len(first) <= 64, first


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_of_a_narrow_terminal_cuts_nothing(path: tuple[str, ...]) -> None:
    def words(columns: str) -> list[str]:
        result = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": columns})
        assert max(map(len, result.output.splitlines())) <= int(columns)
        return re.findall(r"[^\s│─╭╮╰╯]+", result.output)

    assert words("80") == words("100")


EXAMPLES = [
    line.strip()
    for command in ALL.values()
    for line in (command.help or "").splitlines()
    if line.startswith("    baton ")
]


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_fit_and_are_accepted(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "requests.jsonl").touch()
    assert len(example) <= 74
    parse(shlex.split(example)[1:])


def test_a_command_shows_values_bounds_defaults_and_variables_of_options() -> None:
    lines = [line.strip("│ ") for line in help_of(("keys", "create")).splitlines()]
    assert "NAME" in lines
    assert "--file FILE (required, or $BATON_KEYS_FILE)" in lines
    at = lines.index("--scope inference|metrics|admin")
    assert lines[at + 1].endswith(" Default: inference.")
    lines = [line.strip("│ ") for line in help_of(("drain",)).splitlines()]
    at = lines.index("--deadline SECONDS (0 to 3600)")
    assert " ".join(lines[at + 1 : at + 3]).endswith(" Default: 30.")
    assert "Usage: root drain [OPTIONS] WORKER" in lines
    panels = [line for line in lines if line.startswith("╭")]
    assert [panel.split()[1] for panel in panels] == ["Arguments", "Options", "Connection"]


def test_commands_are_in_panels_and_nothing_destructive_is_first() -> None:
    text = help_of(())
    panels = re.findall(r"─ (\w+) ─", text)
    assert panels == ["Options", "Serve", "Operate", "Plan", "Measure", "Security"]
    assert list(ALL[()].list_commands(None))[:1] == ["serve"]
    listed = re.findall(r"^│ ([a-z]+) ", text, re.MULTILINE)
    assert listed == list(ALL[()].list_commands(None))
    assert listed.index("status") < listed.index("drain")


def test_benchmarks_of_baton_itself_come_last() -> None:
    text = help_of(("bench",))
    assert text.index(" goodput ") < text.index("For Baton's developers") < text.index(" peers ")


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("grammar", "loadtest.engine.grammar_bench"),
        ("index", "loadtest.cluster.index_bench"),
        ("overload", "loadtest.cluster.overload"),
        ("policy", "loadtest.cluster.policy_bench"),
        ("router", "loadtest.router.router_bench"),
        ("speculation", "loadtest.engine.speculation"),
        ("tiers", "loadtest.engine.tier_bench"),
    ],
)
def test_a_benchmark_that_moved_names_its_module(name: str, module: str) -> None:
    result = CliRunner().invoke(app, ["bench", name, "--json", "file"], prog_name="baton")
    assert result.exit_code == 2
    assert f"error: `baton bench {name}` is now `python -m {module}`\n" in result.stderr
    helped = CliRunner().invoke(importlib.import_module(module).app, ["--help"])
    assert helped.exit_code == 0
    assert "--json" in helped.output


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version(flag: str) -> None:
    result = CliRunner().invoke(app, [flag])
    assert result.exit_code == 0
    assert re.fullmatch(r"baton \d+\.\d+\.\d+\S*\n", result.output)


def test_it_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "baton", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("baton ")
    help_text = subprocess.run(
        [sys.executable, "-m", "baton", "--help"], capture_output=True, text=True, check=True
    ).stdout
    assert "Usage: baton [OPTIONS]" in help_text


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['baton', '--help']\n"
        "from deploy.cli.main import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'ray', 'pydantic', 'httpx', 'grpc', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["drain", "decode-0", "--polciy"], "error: No such option: --polciy"),
        (["servr"], "error: No such command 'servr'"),
        (["role", "decode-0", "both"], "'both' is not one of 'prefill', 'decode'"),
        (["status", "-o", "xml"], "'xml' is not one of 'table', 'json'"),
    ],
)
def test_a_wrong_command_line_is_reported_as_every_error(words: list[str], says: str) -> None:
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert says in result.stderr
    assert "--help` for the options" in result.stderr
    assert "╭" not in result.stderr


def test_choices_are_those_of_the_product() -> None:
    assert {one.value for one in choices.Scope} == set(get_args(Scope))
    assert set(get_args(choices.Endpoint)) == set(get_args(openai_target.Endpoint))
    arrivals = [
        one for part in get_args(load_settings.Arrivals) for one in get_args(part) or [part]
    ]
    assert set(get_args(choices.Arrivals)) == set(arrivals)
