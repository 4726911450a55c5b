"""A/B benchmark of two commits: ``python -m tools.ab OLD NEW --command "... --json {out}"``.

Each commit gets a git worktree in a temporary folder. Runs alternate (A B, B A, A B, ...), so that
slow drift of the machine affects both sides alike. ``tools.ab_figures`` compares what they write.

    resolving → preparing (worktree, packages) → running, pair by pair → reported → cleaned up

A failure or a signal skips to reported, if a pair is complete, and to cleaned up.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from baton.errors import ConfigError, Unavailable
from loadtest.common.bench_app import bench_app, say
from loadtest.common.child_processes import last_lines, process_group, signals_interrupt
from tools.ab_figures import compare_runs, numbers, show

_OUT = "{out}"
_PINS = ("pyproject.toml", "requirements/cpu.lock", "requirements/cuda.lock")
_GIT_S = 300.0
_INSTALL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison: a commit, and the benchmark command to run at it."""

    name: str
    commit: str
    command: tuple[str, ...]
    root: Path
    """Path of the commit's worktree."""
    environment: Mapping[str, str]


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)  # noqa: S603
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip() or f"exit code {error.returncode}"
        raise ConfigError(f"git {arguments[0]} failed: {reason}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git {arguments[0]} failed: {error}") from error
    return done.stdout.strip()


def resolve(repository: Path, ref: str) -> str:
    """Return the hash of the commit that ``ref`` names.

    Raises ConfigError if there is no such commit. Also raises it if the commit is checked out with
    changes to tracked files, since the benchmark would not measure these changes.
    """
    try:
        commit = _git(repository, "rev-parse", "--verify", "--end-of-options", f"{ref}^{{commit}}")
    except ConfigError:
        raise ConfigError(f"{ref!r} is not a commit, branch or tag of {repository}") from None
    changed = _git(repository, "status", "--porcelain", "--untracked-files=no").splitlines()
    if changed and commit == _git(repository, "rev-parse", "HEAD"):
        raise ConfigError(
            f"{ref} is checked out in {repository} with {len(changed)} uncommitted changes, which"
            " would not be measured: commit or stash them first"
        )
    return commit


def parse_command(name: str, text: str) -> tuple[str, ...]:
    """Split the command of one side of the comparison into words.

    Raises ConfigError if the command is empty, cannot be split, or lacks ``{out}``, the file that
    it writes.
    """
    if not text:
        raise ConfigError(f"side {name} has no command: give --{name.lower()} or --command")
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"the command of side {name} cannot be split: {error}") from error
    if not any(_OUT in word for word in words):
        raise ConfigError(f"the command of side {name} lacks {_OUT}, the JSON file that it writes")
    return words


@contextlib.contextmanager
def _worktree(repository: Path, commit: str, root: Path) -> Iterator[None]:
    try:
        _git(repository, "worktree", "add", "--detach", str(root), commit)
        yield
    finally:
        # This fails only if `add` did, whose error is the one to show.
        with contextlib.suppress(ConfigError):
            _git(repository, "worktree", "remove", "--force", "--force", str(root))


def _pins(root: Path) -> tuple[bytes | None, ...]:
    files = [root / name for name in _PINS]
    return tuple(file.read_bytes() if file.is_file() else None for file in files)


def _environment(programs: Path, root: Path) -> dict[str, str]:
    """Return the environment variables for one side of the comparison. ``programs`` comes first in
    PATH, and ``root`` comes first in PYTHONPATH.

    PYTHONPATH precedes an editable install.
    """
    found = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    return found | {"PYTHONPATH": str(root)}


def _install(name: str, root: Path, log: Path) -> Path:
    say(f"{name}: run make install, since its {' and '.join(_PINS)} differ from those here")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    _execute(f"{name}: make install", ("make", "install"), environment, root, log, _INSTALL_S)
    return root / ".venv" / "bin"


def _execute(
    title: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    root: Path,
    log: Path,
    timeout_s: float,
) -> None:
    """Run a command, and write its output to the file ``log``. On failure and timeout, raises
    Unavailable with the last lines of the log."""
    try:
        with process_group(command, environment, log, folder=root) as process:
            code = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        reason = f"did not end in {timeout_s:g} s"
    else:
        if code == 0:
            return
        reason = f"exit code {code}"
    raise Unavailable(f"{title}: {reason}\n{last_lines(log)}".rstrip())


def _measure(side: Side, number: int, folder: Path, timeout_s: float) -> dict[str, list[float]]:
    out, log = (folder / f"{side.name}-{number}.{kind}" for kind in ("json", "log"))
    title = f"{side.name} ({side.commit[:10]}), run {number + 1}"
    say(title)
    command = [word.replace(_OUT, str(out)) for word in side.command]
    _execute(title, command, side.environment, side.root, log, timeout_s)
    try:
        return numbers(json.loads(out.read_text()))
    except (OSError, ValueError) as error:
        raise Unavailable(f"{title}: no JSON was written: {error}\n{last_lines(log)}") from error


def _prepare(
    stack: contextlib.ExitStack,
    repository: Path,
    folder: Path,
    commits: Iterable[tuple[str, str, tuple[str, ...]]],
) -> list[Side]:
    """Make a worktree for each commit; ``stack`` removes it at its end. Commits that pin the same
    packages share one installation of them."""
    environments = {_pins(repository): Path(sys.prefix) / "bin"}
    sides = []
    for name, commit, command in commits:
        root = folder / name.lower()
        stack.enter_context(_worktree(repository, commit, root))
        pins = _pins(root)
        if pins not in environments:
            environments[pins] = _install(name, root, folder / f"{name}-install.log")
        sides.append(Side(name, commit, command, root, _environment(environments[pins], root)))
    return sides


def main(
    old: Annotated[str, typer.Argument(metavar="OLD", help="Commit of side A.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Commit of side B.")],
    command: Annotated[
        str,
        typer.Option(
            help="Benchmark of both sides, run in each worktree: {out} is the JSON file that it"
            " writes. Name other files by absolute paths."
        ),
    ] = "",
    a: Annotated[str, typer.Option("--a", help="Benchmark of side A, if it differs.")] = "",
    b: Annotated[str, typer.Option("--b", help="Benchmark of side B, if it differs.")] = "",
    repetitions: Annotated[int, typer.Option("--repetitions", "-n", min=1, help="Pairs.")] = 5,
    metrics: Annotated[
        str, typer.Option(metavar="REGEX", help="Show numbers whose path matches.")
    ] = "",
    timeout: Annotated[
        float, typer.Option(min=1, help=("Maximum time of one run, in seconds."))
    ] = 3600,
) -> None:
    """Run a benchmark alternately at two commits and compare every number that it writes."""
    commands = parse_command("A", a or command), parse_command("B", b or command)
    try:
        pattern = re.compile(metrics) if metrics else None
    except re.error as error:
        raise ConfigError(f"--metrics is not a regular expression: {error}") from error
    repository = Path(_git(Path.cwd(), "rev-parse", "--show-toplevel"))
    commits = resolve(repository, old), resolve(repository, new)
    title = f"A: {old} ({commits[0][:10]}), B: {new} ({commits[1][:10]})"
    pairs: list[tuple[dict[str, list[float]], dict[str, list[float]]]] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(signals_interrupt())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-ab-")))
        first, second = _prepare(
            stack, repository, folder, zip(("A", "B"), commits, commands, strict=True)
        )
        try:
            for number in range(repetitions):
                order = (second, first) if number % 2 else (first, second)
                found = {side.name: _measure(side, number, folder, timeout) for side in order}
                pairs.append((found["A"], found["B"]))
        finally:
            if pairs:
                show(Console(), compare_runs(pairs, pattern), len(pairs), title)


if __name__ == "__main__":
    bench_app(main)()
