"""Mutation tests: ``python -m tools.mutate [--only TEXT] [--jobs N]``.

The tables in mutations/ list important lines, each with a change that breaks it and the tests that
must fail then. The changes are made in copies of the working tree, one at a time.

    unchanged ─its tests pass→ changed ─a test fails→ killed
                                       ─all pass→ survived: no test proves the line
                                       ─none runs→ broken: the change proves nothing
"""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated, Any

import typer

from baton.errors import ConfigError
from loadtest.common.bench_app import bench_app, say

ROOT = Path(__file__).parents[1]
TABLES = tuple(sorted((ROOT / "tools" / "mutations").glob("*.toml")))
TEST_S = 60
"""Time after which one test counts as failed, in seconds. A mutation may make a test wait
forever."""
RUN_S = 600.0
"""Maximum time of all tests of one mutation, in seconds."""
_PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}")
_FAILED, _PASSED = 1, 0
"""Exit codes of pytest if tests have failed, and if all have passed. With any other code, no test
has run."""
_NO_SHRINKING = """

import hypothesis

hypothesis.settings.register_profile(
    "mutations", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate)
)
hypothesis.settings.load_profile("mutations")
"""
"""Text that is added to conftest.py in the copies of the tree. It makes hypothesis stop at the
first failing example."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A row of a table of mutations: a change of a line, and the tests that must fail then."""

    name: str
    """Description of what the mutation breaks."""
    file: str
    """The module that the mutation changes, as a path from the root of the repository."""
    old: str
    """Text that the mutation replaces; it occurs once in the module."""
    new: str
    tests: tuple[str, ...]
    """Test files, or single tests in them. At least one must fail after the change."""


class Outcome(enum.Enum):
    """Result of a mutation; the module's docstring has the transitions."""

    KILLED = "killed"
    SURVIVED = "survived"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True)
class Judged:
    """A mutation and its result."""

    mutation: Mutation
    outcome: Outcome
    output: str
    """The last lines that the mutation's tests printed."""


def read_mutations(*tables: Path) -> list[Mutation]:
    """Return the mutations that the files ``tables`` list. Raises ConfigError."""
    found: list[Mutation] = []
    for path in tables:
        rows: list[dict[str, Any]] = tomllib.loads(path.read_text()).get("mutation", [])
        try:
            found += [Mutation(**row | {"tests": tuple(row["tests"])}) for row in rows]
        except (TypeError, KeyError) as error:
            raise ConfigError(f"{path}: a row has other fields than Mutation: {error}") from None
    repeated = [name for name, count in Counter(one.name for one in found).items() if count > 1]
    if repeated:
        raise ConfigError(f"several mutations are named {repeated[0]!r}")
    return found


def changed_text(mutation: Mutation, root: Path = ROOT) -> str:
    """Return the text of the mutated module, with the mutation applied.

    Raises ConfigError if the mutation no longer applies: the text to replace is missing or occurs
    several times, or a test is missing.
    """
    said = f"the mutation {mutation.name!r} no longer applies"
    try:
        text = (root / mutation.file).read_text()
    except OSError:
        raise ConfigError(f"{said}: there is no file {mutation.file}") from None
    if (count := text.count(mutation.old)) != 1:
        raise ConfigError(f"{said}: {mutation.file} has its text {count} times instead of once")
    if mutation.old == mutation.new:
        raise ConfigError(f"{said}: it changes nothing")
    for test in mutation.tests:
        path, _, function = test.partition("::")
        name = function.partition("[")[0].rpartition("::")[2]
        text_of = (root / path).read_text() if (root / path).is_file() else ""
        if not text_of or (name and f"def {name}(" not in text_of):
            raise ConfigError(f"{said}: there is no test {test}")
    return text.replace(mutation.old, mutation.new)


class TreeCopy:
    """A copy of the working tree, in which tests run."""

    def __init__(self, folder: Path, root: Path = ROOT) -> None:
        """Copy the working tree: Git's tracked files, and new files that Git does not ignore.
        Raises ConfigError."""
        self.root = folder
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        try:
            listed = subprocess.run(command, cwd=root, capture_output=True, check=True).stdout  # noqa: S603
        except (OSError, subprocess.CalledProcessError) as error:
            raise ConfigError(f"git ls-files failed in {root}: {error}") from error
        for name in filter(None, listed.decode().split("\0")):
            if (root / name).is_file():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(root / name, folder / name)
        with (folder / "tests" / "conftest.py").open("a") as conftest:
            conftest.write(_NO_SHRINKING)
        # Bytecode is valid for a modification time in whole seconds, so each change has a different
        # time.
        self._times = itertools.count(1_000_000_000)

    def judge(self, mutation: Mutation) -> Judged:
        """Apply the mutation to the copy, run its tests, and undo the change. Return the result."""
        path = self.root / mutation.file
        original = path.read_text()
        try:
            self._write(path, changed_text(mutation, self.root))
            code, output = self.run(mutation.tests)
        finally:
            self._write(path, original)
        outcomes = {_FAILED: Outcome.KILLED, _PASSED: Outcome.SURVIVED}
        return Judged(mutation, outcomes.get(code, Outcome.BROKEN), output)

    def run(self, tests: Iterable[str], *options: str) -> tuple[int, str]:
        """Run tests in the copy.

        Returns pytest's exit code and its last lines; a run that takes too long has failed.
        """
        outer = {name: each for name, each in os.environ.items() if not name.startswith("PYTEST")}
        own = {"PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(  # noqa: S603
            [sys.executable, *_PYTEST, *options, *tests],
            cwd=self.root,
            env=outer | own,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=RUN_S)
        except subprocess.TimeoutExpired:
            return _FAILED, f"not finished after {RUN_S:.0f} s"
        finally:
            # This also ends servers that the tests have started.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return process.returncode, "\n".join(output.splitlines()[-20:])

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        at = next(self._times)
        os.utime(path, (at, at))


def judge_all(mutations: Sequence[Mutation], copies: Sequence[TreeCopy]) -> Iterator[Judged]:
    """Run the tests of each mutation, in parallel: one mutation in each copy at a time. Yield the
    results as they are known."""
    free: SimpleQueue[TreeCopy] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def judged(mutation: Mutation) -> Judged:
        copy = free.get()
        try:
            return copy.judge(mutation)
        finally:
            free.put(copy)

    with ThreadPoolExecutor(len(copies)) as threads:
        for task in as_completed([threads.submit(judged, one) for one in mutations]):
            yield task.result()


def main(
    only: Annotated[str, typer.Option(help="Rows whose name or file has this text.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Number of rows that run at a time.")] = 2,
) -> None:
    """Break important lines, one at a time, and report those that no test detects."""
    mutations = [one for one in read_mutations(*TABLES) if only in one.name or only in one.file]
    if not mutations:
        raise ConfigError(f"no row has {only!r} in its name or file")
    for mutation in mutations:
        changed_text(mutation)
    with tempfile.TemporaryDirectory(prefix="baton-mutate-") as folder:
        copies = [TreeCopy(Path(folder, str(number))) for number in range(jobs)]
        tests = dict.fromkeys(test for one in mutations for test in one.tests)
        say(f"{len(mutations)} mutations; their tests run without a change first")
        code, output = copies[0].run(tests, "-n", str(jobs))
        if code != _PASSED:
            raise ConfigError(f"without a change these tests fail:\n{output}")
        kept = []
        for judged in judge_all(mutations, copies):
            typer.echo(f"{judged.outcome.value:9} {judged.mutation.name}")
            if judged.outcome is not Outcome.KILLED:
                kept.append(judged)
    for judged in kept:
        typer.echo(f"\n{judged.mutation.name}: {judged.outcome.value}\n{judged.output}")
    typer.echo(f"\n{len(mutations) - len(kept)} of {len(mutations)} mutations were killed")
    if kept:
        raise ConfigError(f"{len(kept)} mutations were not killed")


if __name__ == "__main__":
    bench_app(main)()
