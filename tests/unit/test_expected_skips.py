"""A run that skips others than expected fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.expected_skips import read_expected, wrong_skips

pytestmark = pytest.mark.long

EXPECTED = {"no GPU": 2, "the trace": 1}
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "reasons",
    [[], ["no GPU here"], ["no GPU here", "no GPU there"], ["no GPU here", "the trace is away"]],
)
def test_the_expected_number_and_fewer_are_in_order(reasons: list[str]) -> None:
    assert wrong_skips(reasons, EXPECTED) == []


@pytest.mark.parametrize(
    ("reasons", "said"),
    [
        (3 * ["no GPU here"], "3 tests skip because: no GPU; expected are at most 2"),
        (["nginx is missing"], "no test may skip because: nginx is missing"),
    ],
)
def test_unexpected_skips_are_reported(reasons: list[str], said: str) -> None:
    assert wrong_skips(reasons, EXPECTED) == [said]


def test_the_table_has_the_runs_of_the_makefile() -> None:
    runs = [
        word.split()[0] for word in (ROOT / "Makefile").read_text().split("--expect-skips ")[1:]
    ]
    assert runs == ["parts", "clusters"]
    for run in runs:
        assert all(count > 0 for count in read_expected(run).values())


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("reason", "code"), [("the trace is not here", 0), ("a whim", 1)])
def test_pytest_fails_by_it(tmp_path: Path, reason: str, code: int, workers: int) -> None:
    test = tmp_path / "test_it.py"
    test.write_text(f"import pytest\n\n\ndef test_it():\n    pytest.skip({reason!r})\n")
    options = ("--expect-skips", "parts", "-n", str(workers), "-p", "tests.conftest")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--rootdir", str(tmp_path), *options, str(test)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout
    assert ("no test may skip because: a whim" in done.stdout) == bool(code)
