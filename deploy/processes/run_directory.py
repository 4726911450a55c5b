"""One run of a cluster on a machine: its directory, and the mark of its processes.

The directory holds sockets, logs, secrets and the cluster's state. The mark is two variables in the
environment of every process of the run.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import psutil

PREFIX = "baton-"
_MEMORY = Path("/dev/shm")  # noqa: S108
"""A file system in memory."""
_LONGEST_PARENT = 30
CLUSTER_VARIABLE = "BATON_CLUSTER_ID"
RUN_VARIABLE = "BATON_RUN_DIRECTORY"


def parent_directory() -> Path:
    """Return the folder that contains all run directories: the system's temporary directory.

    It must have a short path: the path of a UNIX socket has at most 107 bytes, and Ray's own part
    of it takes about 70. Unlike Python's own choice, this one does not change when the disk is
    full: commands still find the clusters of this machine.
    """
    given = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for parent in (Path(path).absolute() for path in given if path):
        if parent.is_dir() and len(os.fsencode(parent)) <= _LONGEST_PARENT:
            return parent
    return Path("/tmp")  # noqa: S108


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run. Only its owner can read it.

    A process of the run holds a lock on it until it ends for any reason: see ``is_live``.
    """

    path: Path
    lock: int = field(default=-1, compare=False, repr=False)
    """Descriptor of the locked directory; -1 if this object holds no lock."""

    @classmethod
    def create(cls) -> RunDirectory:
        """Create the directory of a new run, and lock it. Raises OSError."""
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent_directory()))
        run = cls(path, _locked(path))
        run.logs.mkdir()
        return run

    @classmethod
    def of_node(cls, cluster_id: str) -> RunDirectory:
        """Return the directory for a cluster's workers on a Ray node that Baton did not start, and
        lock it for this process.

        Raises PermissionError if another user owns it.
        """
        path = parent_directory() / f"{PREFIX}node-{cluster_id}"
        path.mkdir(mode=0o700, exist_ok=True)
        if path.is_symlink() or path.stat().st_uid != os.getuid():
            raise PermissionError(f"{path} belongs to another user")
        run = cls(path, _locked(path))
        run.logs.mkdir(exist_ok=True)
        return run

    @property
    def is_live(self) -> bool:
        """Whether a process of the run, such as its launcher, holds the lock. Raises OSError."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
        return False

    @property
    def workers(self) -> Path:
        """Return the path of the list of this node's workers: see
        ``deploy.workers.node.NodeWorkers``."""
        return self.path / "workers"

    @property
    def costs(self) -> Path:
        """Return the path of the file with the step costs that workers on this node have
        measured."""
        return self.path / "costs"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def ray(self) -> Path:
        """Return the path of Ray's own directory. The name is short, because paths of sockets are
        limited."""
        return self.path / "ray"

    @property
    def router_metrics(self) -> Path:
        """Return the path of a folder for metrics. Router processes of one cluster share their
        metrics through its files, which they map.

        It is in memory where the system has a place for that: on a full disk, a write to a mapped
        file ends the process (SIGBUS).
        """
        if os.access(_MEMORY, os.W_OK):
            return _MEMORY / f"{self.path.name}-metrics"
        return self.path / "router-metrics"

    def log(self, name: str) -> Path:
        """Return the path of a process's log file."""
        return self.logs / f"{name}.log"

    def stderr(self, name: str) -> Path:
        """Return the path of what native code of a worker's process writes to standard error."""
        return self.logs / f"{name}.stderr"

    def write_secret(self, name: str, content: str) -> Path:
        """Write ``content`` to a new file in the run directory, which only its owner can read.
        Return the path."""
        path = self.path / name
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(content)
        return path

    @property
    def about(self) -> Path:
        """Return the path of the file that says which run this is: see
        ``deploy.processes.run_history``."""
        return self.path / "run.json"

    def remove(self) -> None:
        """Delete the directory, and release its lock; idempotent."""
        shutil.rmtree(self.router_metrics, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)
        self._release()

    def keep_logs(self) -> bool:
        """Delete all of the run directory but the logs and what ``about`` says, move Ray's logs
        next to the others, and release the lock. Return whether there are logs; without any,
        nothing is kept."""
        with contextlib.suppress(OSError):
            (self.ray / "session_latest" / "logs").resolve(strict=True).rename(self.logs / "ray")
        if not any(file.stat().st_size for file in self.logs.rglob("*") if file.is_file()):
            self.remove()
            return False
        shutil.rmtree(self.router_metrics, ignore_errors=True)
        for entry in self.path.iterdir():
            if entry in (self.logs, self.about):
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    entry.unlink()
        self._release()
        return True

    def _release(self) -> None:
        if self.lock >= 0:
            fcntl.flock(self.lock, fcntl.LOCK_UN)


def _locked(path: Path) -> int:
    """Lock a directory for this process until it ends. Processes of one run share the lock."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@dataclass(frozen=True, slots=True)
class ClusterMark:
    """The mark of all processes of one run of a cluster, by which they are found.

    The cluster id alone is not enough as a mark: it is also a setting, so an operator's shell may
    have it. No two runs share a run directory.
    """

    cluster_id: str
    run_directory: Path

    @property
    def variables(self) -> dict[str, str]:
        """Return the environment variables that are the mark: a child process with them carries
        it."""
        return {CLUSTER_VARIABLE: self.cluster_id, RUN_VARIABLE: str(self.run_directory)}

    def environment(self) -> dict[str, str]:
        """Return this process's environment with the mark added."""
        return {**os.environ, **self.variables}

    def processes(self) -> list[psutil.Process]:
        """Return every running process with the mark; zombies do not count."""
        return [process for process in psutil.process_iter() if self.of(process) == self]

    @classmethod
    def of(cls, process: psutil.Process) -> ClusterMark | None:
        """Return the mark of a process; None if it has none, or if this user may not see it."""
        try:
            environment = process.environ()
            return cls(environment[CLUSTER_VARIABLE], Path(environment[RUN_VARIABLE]))
        except (psutil.Error, OSError, KeyError):
            return None
