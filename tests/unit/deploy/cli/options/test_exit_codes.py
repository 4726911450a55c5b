"""One table of exit codes, in the code and in the docs."""

from __future__ import annotations

import re
from enum import unique
from pathlib import Path

from deploy.cli.options.exit_codes import ExitCode

ROOT = Path(__file__).parents[5]


def test_no_code_has_two_meanings() -> None:
    unique(ExitCode)


def test_the_docs_list_every_code() -> None:
    page = (ROOT / "docs/reference/cli.md").read_text()
    listed = dict(re.findall(r"^\| (\d+) \| `([A-Z_]+)` \|", page, re.MULTILINE))
    assert {int(code): name for code, name in listed.items()} == {
        int(code): code.name for code in ExitCode
    }


def test_commands_use_the_table() -> None:
    """No command ends with a number of its own."""
    literal = re.compile(r"Exit\([^)]*\b\d+\b|[( ]code=\d|sys\.exit\(\d")
    files = list((ROOT / "deploy/cli").rglob("*.py"))
    assert len(files) > 30
    found = {path.name for path in files if literal.search(path.read_text())}
    assert found == set()
