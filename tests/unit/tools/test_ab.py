"""A/B runs of small commands at two commits of small git repositories."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from baton.errors import ConfigError
from tools.ab import parse_command, resolve

pytestmark = pytest.mark.timeout(120)

DEADLINE_S = 90.0
ROOT = Path(__file__).parents[3]
# Reads a module of the commit, so that PYTHONPATH and the working directory are tested too.
BENCH = """
import json, sys
from pathlib import Path
import speed
with open(sys.argv[2], "a") as order:
    order.write(speed.NAME)
Path(sys.argv[1]).write_text(json.dumps({"tokens_per_s": speed.VALUE, "requests": 8}))
"""
FAIL = "import sys\nprint('first line')\nsys.exit('the model is missing')\n"
CHILD = "import time\nprint('child', flush=True)\ntime.sleep(600)\n"
SLEEP = """
import subprocess, sys, time
from pathlib import Path
child = subprocess.Popen([sys.executable, "child.py"])
Path(sys.argv[1]).write_text(str(child.pid))
time.sleep(600)
"""
INSTALLED = """
import os, sys
open(sys.argv[1], "w").write('{"x": %d}' % (1 + len(os.environ.get("INSTALLED", ""))))
"""
# What `make install` makes here: an environment whose python marks what it runs.
MAKEFILE = """
install:
\tmkdir -p .venv/bin
\tprintf '#!/bin/sh\\nINSTALLED=yes exec {python} "$$@"\\n' > .venv/bin/python
\tchmod +x .venv/bin/python
"""


def git(repository: Path, *arguments: str) -> str:
    command = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@t"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def commit(repository: Path, **files: str) -> None:
    for name, text in files.items():
        (repository / (name if name == "Makefile" else f"{name}.py")).write_text(text)
    git(repository, "add", "-A")
    git(repository, "commit", "--quiet", "-m", "change")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits, ``old`` and ``new``, which the file ``speed.py`` distinguishes."""
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "--quiet")
    programs = {
        "bench": BENCH,
        "failing": FAIL,
        "child": CHILD,
        "sleeping": SLEEP,
        "installed": INSTALLED,
    }
    commit(folder, speed="NAME, VALUE = 'o', 100.0\n", **programs)
    git(folder, "tag", "old")
    commit(folder, speed="NAME, VALUE = 'n', 150.0\n")
    git(folder, "tag", "new")
    return folder


def start(repository: Path, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    return subprocess.Popen(
        [sys.executable, "-m", "tools.ab", *arguments],
        cwd=repository,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(repository: Path, tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(repository, tmp_path, *arguments)
    out, err = process.communicate(timeout=DEADLINE_S)
    assert_clean(repository, tmp_path)
    return process.returncode, out, err


def assert_clean(repository: Path, tmp_path: Path) -> None:
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    assert not list((tmp_path / "temporary").iterdir())


def test_pairs_alternate_and_the_table_shows_the_ratio(repository: Path, tmp_path: Path) -> None:
    order = tmp_path / "order"
    command = f"python bench.py {{out}} {shlex.quote(str(order))}"
    code, out, err = run(repository, tmp_path, "old", "new", "--command", command, "-n", "3")
    assert code == 0, err
    assert order.read_text() == "onnoon"
    [row] = [line for line in out.splitlines() if "tokens_per_s" in line]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells == ["tokens_per_s", "100", "150", "1.500", "1.500", "1.500"]
    assert f"A: old ({git(repository, 'rev-parse', 'old')[:10]}), B: new (" in out
    assert "1 numbers are the same in all runs and left out." in out


def test_each_side_may_have_its_own_command(repository: Path, tmp_path: Path) -> None:
    template = "python -c \"open('{{out}}', 'w').write('{{\\\"x\\\": {}}}')\""
    commands = ("--a", template.format(4), "--b", template.format(2))
    code, out, err = run(repository, tmp_path, "new", "new", *commands, "-n", "1")
    assert code == 0, err
    assert "0.500" in out


def test_a_commit_with_other_packages_gets_its_own_environment(
    repository: Path, tmp_path: Path
) -> None:
    makefile = MAKEFILE.format(python=sys.executable)
    git(repository, "checkout", "--quiet", "-b", "packages")
    (repository / "requirements").mkdir()
    (repository / "requirements" / "cpu.lock").write_text("torch==0\n")
    commit(repository, Makefile=makefile)
    git(repository, "checkout", "--quiet", "old")
    arguments = ("old", "packages", "--command", "python installed.py {out}", "-n", "1")
    code, out, err = run(repository, tmp_path, *arguments)
    assert code == 0, err
    assert "B: run make install" in err
    assert "A: run make install" not in err
    assert "4.000" in out


def test_a_failed_run_shows_the_last_lines_of_its_log(repository: Path, tmp_path: Path) -> None:
    arguments = ("old", "new", "--command", "python failing.py {out}")
    code, _, err = run(repository, tmp_path, *arguments)
    assert code == 1
    assert "run 1: exit code 1\nfirst line\nthe model is missing" in err


def test_a_run_that_writes_nothing_fails(repository: Path, tmp_path: Path) -> None:
    code, _, err = run(repository, tmp_path, "old", "new", "--command", "python -c 0 {out}")
    assert code == 1
    assert "no JSON was written" in err


def test_a_run_has_a_deadline(repository: Path, tmp_path: Path) -> None:
    arguments = ("--command", "python sleeping.py {out}", "--timeout", "1")
    code, _, err = run(repository, tmp_path, "old", "new", *arguments)
    assert code == 1
    assert "did not end in 1 s" in err


def test_sigterm_ends_all_processes_and_removes_the_worktrees(
    repository: Path, tmp_path: Path
) -> None:
    out = tmp_path / "child pid"
    command = f"python sleeping.py {shlex.quote(str(out))} {{out}}"
    process = start(repository, tmp_path, "old", "new", "--command", command)
    deadline = time.monotonic() + DEADLINE_S
    while not (out.exists() and out.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child = psutil.Process(int(out.read_text()))
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE
    assert_clean(repository, tmp_path)


def test_uncommitted_changes_of_a_measured_commit_are_refused(repository: Path) -> None:
    (repository / "speed.py").write_text("changed\n")
    assert resolve(repository, "old") == git(repository, "rev-parse", "old")
    with pytest.raises(ConfigError, match=r"new is checked out .* commit or stash"):
        resolve(repository, "new")


@pytest.mark.parametrize("ref", ["none", "--all", ""])
def test_an_unknown_ref_is_named(repository: Path, ref: str) -> None:
    with pytest.raises(ConfigError, match=f"'{ref}' is not a commit"):
        resolve(repository, ref)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "side A has no command: give --a or --command"),
        ("python bench.py", "lacks {out}"),
        ("python 'bench.py {out}", "cannot be split"),
    ],
)
def test_a_command_that_cannot_work_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_command("A", text)
