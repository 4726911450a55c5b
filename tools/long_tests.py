"""Runs long tests in shards, and records the results.

``python -m tools.long_tests`` runs all shards, ``--shard N`` one, ``--commit HASH`` the one of a
commit, so that a few commits run all. Named files run alone. ``--report FILE`` writes the results
to a page, from which the next run knows how long each file takes. Commits choose among the files of
that page: a commit cannot break a file that has never run.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/lab-notes/long-tests.md"
SHARD_MINUTES = 10.0
_UNKNOWN_S = 60.0
"""Assumed duration in seconds of the long tests in a file that has never run."""
_PATIENCE = 2.0
"""Factor by which a shard may exceed its expected time before it is ended."""
_END_S = 120.0
"""Time that a shard has after SIGINT to stop its clusters, in seconds."""
_COLLECT_S = 600.0
_PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main())
"""
"""A program that runs pytest so that SIGINT ends its fixtures, even where SIGINT is ignored, as in
background jobs."""
_WHOLE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
"""Exit codes of pytest that mean that all tests have run."""
_INTRODUCTION = """# Long tests

`make test-long` runs the tests that take minutes, in shards of about ten minutes, and writes this
page. `make test-long SHARD=2` runs one shard, `make test-long TESTS=FILE` one file. `COMMIT=HASH`
chooses a shard by a commit's hash. A file's row is from the last time that `make test-long` ran it.
"""


@dataclass(frozen=True, slots=True)
class Row:
    """Results of the long tests in one file: a row of the results page."""

    file: str
    """Path of the test file, relative to the repository."""
    date: str
    """Date of the last run as YYYY-MM-DD, UTC."""
    commit: str
    passed: int
    failed: int
    """Number of failed tests, including errors outside the test."""
    skipped: int
    seconds: float


def shards(seconds: Mapping[str, float], bound_s: float) -> list[tuple[str, ...]]:
    """Group test files by duration, with at most ``bound_s`` seconds per group.

    A file that takes longer than that is a separate group. The same files and times give the same
    groups.
    """
    groups: list[list[str]] = []
    sums: list[float] = []
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        place = next((n for n, sum_s in enumerate(sums) if sum_s + seconds[file] <= bound_s), None)
        if place is None:
            place = len(groups)
            groups.append([])
            sums.append(0.0)
        groups[place].append(file)
        sums[place] += seconds[file]
    return [tuple(sorted(group)) for group in groups]


def shard_of(commit: str, count: int) -> int:
    """Return the shard of a commit, from 0 to ``count`` - 1.

    ``commit`` is its hash, in hex digits.
    """
    return int(commit, 16) % count


def rows_of(results: str, date: str, commit: str) -> dict[str, Row]:
    """Parse pytest's ``--junitxml`` output with ``junit_family=xunit1`` into one row per test
    file."""
    found: dict[str, Row] = {}
    for case in ElementTree.fromstring(results).iter("testcase"):  # noqa: S314 - of pytest
        file = case.get("file")
        if file is None:
            # This test was interrupted.
            continue
        before = found.get(file, Row(file, date, commit, 0, 0, 0, 0.0))
        failed = case.find("failure") is not None or case.find("error") is not None
        skipped = case.find("skipped") is not None
        found[file] = Row(
            file,
            date,
            commit,
            before.passed + (not failed and not skipped),
            before.failed + failed,
            before.skipped + skipped,
            round(before.seconds + float(case.attrib["time"]), 1),
        )
    return found


def page_of(rows: Iterable[Row]) -> str:
    """Return the text of the results page with these rows."""
    ordered = sorted(rows, key=lambda row: row.file)
    passed, failed, skipped = (
        sum(getattr(row, name) for row in ordered) for name in ("passed", "failed", "skipped")
    )
    minutes = sum(row.seconds for row in ordered) / 60
    lines = [
        _INTRODUCTION,
        f"{passed} passed, {failed} failed, {skipped} skipped, {minutes:.0f} minutes.",
        "",
        "| " + " | ".join(field.name for field in fields(Row)) + " |",
        "|" + " --- |" * len(fields(Row)),
    ]
    for row in ordered:
        cells = [str(getattr(row, field.name)) for field in fields(Row)]
        lines.append("| " + " | ".join([f"`{cells[0]}`", *cells[1:]]) + " |")
    return "\n".join(lines) + "\n"


def read_page(text: str) -> dict[str, Row]:
    """Return the rows of a results page, by test file."""
    found = {}
    for line in text.splitlines():
        if line.startswith("| `"):
            file, date, commit, *counts, seconds = (
                cell.strip("` ") for cell in line.strip("|").split("|")
            )
            passed, failed, skipped = map(int, counts)
            found[file] = Row(file, date, commit, passed, failed, skipped, float(seconds))
    return found


def long_files(root: Path = ROOT) -> list[str]:
    """Return the paths of test files that contain long tests. Raises CalledProcessError with
    pytest's output."""
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "long")
    done = subprocess.run(  # noqa: S603 - a command of our own
        command, cwd=root, capture_output=True, text=True, timeout=_COLLECT_S, check=True
    )
    return sorted(set(re.findall(r"^(\S+\.py)::", done.stdout, re.MULTILINE)))


def run_shard(files: Sequence[str], limit_s: float, root: Path = ROOT) -> dict[str, Row]:
    """Run the long tests of files and show pytest's output. Returns the results by file.

    When ``limit_s`` seconds have passed or pytest ends early, the file that was running and all
    remaining files count as failed.
    """
    date, commit = time.strftime("%Y-%m-%d", time.gmtime()), _commit(root)
    with tempfile.TemporaryDirectory(prefix="long-tests-") as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-c", _PYTEST, "-m", "long", "--durations=10"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={results}", *files]
        process = subprocess.Popen(command, cwd=root, start_new_session=True)  # noqa: S603 - as above
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            _say(f"ended after {limit_s:.0f} s")
            _end(process)
        except BaseException:
            _end(process)
            raise
        found = rows_of(results.read_text(), date, commit) if results.exists() else {}
    if found and process.returncode not in _WHOLE:
        last = list(found)[-1]
        found[last] = replace(found[last], failed=found[last].failed + 1)
    missing = (Row(file, date, commit, 0, 1, 0, 0.0) for file in files if file not in found)
    return found | {row.file: row for row in missing}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _commit(root: Path) -> str:
    command = ("git", "rev-parse", "--short=8", "HEAD")
    done = subprocess.run(  # noqa: S603 - as above
        command, cwd=root, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Run the long tests that the arguments select. Returns 1 if a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.long_tests", description=__doc__)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--commit", help="run the shard of this commit's hash")
    which.add_argument("--shard", type=int, help="run this shard, from 1")
    which.add_argument("files", nargs="*", default=[], help="run the long tests of these files")
    parser.add_argument(
        "--minutes", type=float, default=SHARD_MINUTES, help=("maximum duration of a shard")
    )
    parser.add_argument("--list", action="store_true", help="show the shards, and run nothing")
    parser.add_argument("--report", type=Path, help="page for the results")
    asked = parser.parse_args(arguments)

    page = asked.report or PAGE
    known = read_page(page.read_text()) if page.exists() else {}
    files = asked.files or long_files(root)
    if asked.commit:
        files = [file for file in files if file in known] or files
    seconds = {file: known[file].seconds if file in known else _UNKNOWN_S for file in files}
    groups = shards(seconds, 60 * asked.minutes)
    chosen = range(len(groups))
    if asked.commit:
        chosen = range(number := shard_of(asked.commit, len(groups)), number + 1)
    elif asked.shard:
        if not 1 <= asked.shard <= len(groups):
            parser.error(f"--shard {asked.shard}: there are only {len(groups)}")
        chosen = range(asked.shard - 1, asked.shard)

    rows = {file: row for file, row in known.items() if asked.files or file in seconds}
    has_failed = False
    for number in chosen:
        group = groups[number]
        planned_s = sum(seconds[file] for file in group)
        _say(f"shard {number + 1} of {len(groups)}, about {planned_s:.0f} s: {' '.join(group)}")
        if asked.list:
            continue
        found = run_shard(group, _PATIENCE * max(planned_s, 60 * asked.minutes), root)
        has_failed = has_failed or any(row.failed for row in found.values())
        rows |= found
        if asked.report:
            # The page is written after each shard, so that an interrupted run keeps its results.
            asked.report.write_text(page_of(rows.values()))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
