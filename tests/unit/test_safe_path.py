"""No process of Baton imports modules of the folder in which it was started."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = (
    *("baton", "engine", "kvtransfer", "worker", "prefill_worker", "decode_worker", "router"),
    *("planning", "loadtest", "deploy"),
)
HOSTILE = "raise SystemExit('a module of the current folder was imported')\n"


def commands(path: Path) -> Iterator[tuple[int, str]]:
    """The command lines that run this Python: their lines, and the first argument of each."""
    text = path.read_text(encoding="utf-8")
    if "sys.executable" not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.List | ast.Tuple) and node.elts:
            first, *others = map(ast.unparse, node.elts)
            if first == "sys.executable":
                yield node.lineno, others[0]


def test_each_python_that_is_started_has_a_safe_path() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": argument
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for line, argument in commands(path)
    }
    assert len(found) > 5
    assert {where for where, argument in found.items() if argument != "'-P'"} == set()


@pytest.mark.parametrize("options", [(), ("-P",)])
def test_python_m_baton_imports_nothing_of_the_current_folder(
    options: tuple[str, ...], tmp_path: Path
) -> None:
    for room in ROOMS[1:]:
        (tmp_path / f"{room}.py").write_text(HOSTILE)
    done = subprocess.run(
        [sys.executable, *options, "-m", "baton", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("baton ")
