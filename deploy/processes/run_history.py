"""The runs of this user on this machine: those that are live, and the last ones that ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass

from pydantic import TypeAdapter

from baton.errors import ConfigError
from deploy.processes.run_directory import PREFIX, RunDirectory, parent_directory

KEPT_RUNS = 5
"""Number of runs that have ended whose logs are kept."""
MIN_FREE_BYTES = 16 << 20
"""Free space that a run needs for its sockets, secrets and first log lines, in bytes. A start of
one prefill and one decode worker writes less than 1 MiB."""


@dataclass(frozen=True, slots=True)
class About:
    """What a run directory says about its run."""

    cluster_id: str = ""
    model: str = ""
    """The model as it was asked for; empty for a node that has joined a cluster."""
    started_at: float = 0.0
    """Unix time of the start, in seconds; 0: unknown."""


_ABOUT = TypeAdapter(About)


@dataclass(frozen=True, slots=True)
class Run:
    """One run, which is live or has ended."""

    directory: RunDirectory
    about: About
    changed_at: float
    """Unix time of the last change of its directory, in seconds: about that of its end."""
    is_live: bool

    @property
    def name(self) -> str:
        return self.directory.path.name


def start_run(cluster_id: str, model: str) -> RunDirectory:
    """Make the directory of a new run, and remove the logs of all but the last runs that ended.

    Raises ConfigError if the folder of run directories has no space, or cannot be written.
    """
    try:
        prune_runs()
        check_run_space()
        run = RunDirectory.create()
        about = About(cluster_id, model, time.time())
        run.about.write_text(json.dumps(asdict(about)))
    except OSError as error:
        raise ConfigError(_cannot(error.strerror or str(error))) from error
    return run


def check_run_space() -> int:
    """Return the free space for a run directory, in bytes. Raises ConfigError if it is less than a
    run needs."""
    free = shutil.disk_usage(parent_directory()).free
    if free < MIN_FREE_BYTES:
        needed = MIN_FREE_BYTES >> 20
        raise ConfigError(_cannot(f"{free >> 20} MiB are free, and a run needs {needed}"))
    return free


def _cannot(why: str) -> str:
    return (
        f"no run directory can be made in {parent_directory()} ({why}): free space there, or set"
        " TMPDIR to another folder with a short path"
    )


def prune_runs(kept: int = KEPT_RUNS) -> None:
    """Remove the directories of all but the last ``kept`` runs that have ended."""
    for run in [run for run in runs() if not run.is_live][kept:]:
        run.directory.remove()


def runs() -> list[Run]:
    """Return the runs of this user on this machine: those that are live first, and then the newest
    first."""
    found = []
    for path in parent_directory().glob(f"{PREFIX}*/"):
        # Another user's directory, or one that is removed now.
        with contextlib.suppress(OSError):
            state = path.lstat()
            directory = RunDirectory(path)
            if state.st_uid == os.getuid() and directory.logs.is_dir():
                live = directory.is_live
                found.append(Run(directory, _about(directory), state.st_mtime, live))
    return sorted(found, key=lambda run: (run.is_live, run.changed_at), reverse=True)


def _about(directory: RunDirectory) -> About:
    with contextlib.suppress(OSError, ValueError):
        return _ABOUT.validate_json(directory.about.read_bytes())
    return About()
