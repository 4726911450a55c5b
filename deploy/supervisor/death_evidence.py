"""Collects what this node knows about the end of a worker: see ``deploy.supervisor.death``.

Owned by the supervisor's event loop. Of a worker on another node only Ray's word is known.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import shutil
import signal
import time
from pathlib import Path

from baton.host.oom_killer import OomKills
from deploy.processes.child import last_lines
from deploy.processes.exit_watch import ExitWatch
from deploy.processes.run_directory import RunDirectory
from deploy.ray_internals import session_folder
from deploy.supervisor.death import Evidence
from deploy.workers.actor_end import ActorEnd, EndKind
from deploy.workers.node import NodeWorkers

_FULL_BYTES = 1 << 20
"""Free space below which a run directory counts as full, in bytes."""
_STDERR_LINES = 3
_STDERR_LOOKED_AT = 400
_DUMP = re.compile(r"\*\*\* SIG|Fatal Python error: ")
"""Begins what Ray and Python write after a signal: stacks and lists of modules."""
_STDERR_CHARACTERS = 200
"""Maximum length of a line of standard error that is shown."""


class DeathEvidence:
    """The evidence of one node."""

    def __init__(self, run: RunDirectory, *, one_machine: bool) -> None:
        """``run`` is the node's run directory. ``one_machine`` is whether all workers of the
        cluster are on this node."""
        self._run = run
        self._one_machine = one_machine
        self._oom_kills = OomKills()

    def look(self) -> None:
        """Notice whether the kernel has ended a process. Call this at each look at the slots."""
        self._oom_kills.look(time.monotonic())

    def find(self, slot: str) -> ExitWatch | None:
        """Return the process of a slot's worker that runs on this node, even if it does not serve
        yet."""
        for worker in NodeWorkers(self._run.workers).running():
            if worker.slot == slot:
                return ExitWatch(worker.process)
        return None

    async def of(self, slot: str, end: ActorEnd, watched: ExitWatch | None) -> Evidence:
        """Return what is known about the end of a slot's worker. ``watched`` is that of its
        process, if that is known."""
        if not (self._one_machine or (watched is not None and watched.process.is_near)):
            return Evidence(end)
        logged = error_in(last_lines(self._run.log(slot), 1))
        if watched is None or end.kind is not EndKind.PROCESS:
            return Evidence(end, full=self._full(), words=logged)
        code = await watched.exit_code()
        return Evidence(
            end,
            exit_code=code,
            oom_killed=code in (None, -signal.SIGKILL) and self._oom_kills.take(time.monotonic()),
            full=self._full(),
            words=logged,
            stderr=self._native_errors(slot) or _rays_stderr(watched.process.pid),
        )

    def _native_errors(self, slot: str) -> str:
        """Return the last words of native code in a slot's worker, once: the next worker may die
        before it has a file of its own."""
        file = self._run.stderr(slot)
        words = _last_words(file)
        with contextlib.suppress(OSError):
            file.replace(file.with_name(f"{file.name}.1"))
        return words

    def _full(self) -> str:
        """Return the path of the run directory if it is full; otherwise no text."""
        with contextlib.suppress(OSError):
            if shutil.disk_usage(self._run.path).free < _FULL_BYTES:
                return str(self._run.path)
        return ""


def error_in(line: str) -> str:
    """Return the message of a log's line if it is an error, or a line that is of no logger, such as
    the last one of a traceback."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            told = json.loads(line)
            return str(told.get("message", "")) if told.get("level") == "ERROR" else ""
    # Regular lines of text begin with a date.
    if line and line[0].isdigit():
        line = line.partition(" ERROR ")[2].partition(": ")[2]
    return line.strip()


def _rays_stderr(pid: int) -> str:
    """Return the last words of a worker process that Ray has written to a file; empty without
    one. A worker that logs to standard output has no file of its own."""
    files: list[Path] = []
    # Without a connection to Ray there is no session.
    with contextlib.suppress(OSError, AttributeError):
        found = (session_folder() / "logs").glob(f"worker-*-{pid}.err")
        files = sorted(found, key=lambda file: file.stat().st_mtime)
    return _last_words(files[-1]) if files else ""


def _last_words(file: Path) -> str:
    """Return the last lines that a process has written to its standard error before it crashed, as
    one line. Empty if there are none, or no file."""
    lines = last_lines(file, _STDERR_LOOKED_AT).splitlines()
    before = itertools.takewhile(lambda line: not _DUMP.match(line), lines)
    # Ray writes the names of jobs and actors between the lines, each after a colon.
    told = [line.strip() for line in before if not line.startswith(":")]
    return " | ".join(line[:_STDERR_CHARACTERS] for line in told[-_STDERR_LINES:])
