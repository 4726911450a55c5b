"""The workers of a node: each has a number of its own while it lives.

A worker holds the lock of the file that is called as its number, in a folder of its node's run
directory, for as long as its process lives, however that ends. The file says which process it is.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from deploy.processes.process_identity import ProcessIdentity

_MOST = 1 << 16


@dataclass(frozen=True, slots=True)
class NodeWorker:
    """A process that houses a worker."""

    slot: str
    process: ProcessIdentity
    drain_s: float
    """How long it takes at most to leave, once it gets SIGTERM."""
    node: str = ""
    """Ray's id of its node."""
    gcs: str = ""
    """host:port of Ray's control store."""
    cluster: str = ""
    """Id of its cluster."""


_NODE_WORKER = TypeAdapter(NodeWorker)


class NodeRoll:
    """Of one node."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sign(
        self, slot: str, drain_s: float, node: str = "", gcs: str = "", cluster: str = ""
    ) -> int:
        """The lowest free number; it is this process's until it ends. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        me = NodeWorker(slot, ProcessIdentity.own(), drain_s, node, gcs, cluster)
        for number in range(_MOST):
            path = self._folder / str(number)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            if not _lock(descriptor):
                os.close(descriptor)
                continue
            # Never closed: the lock goes with the process.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(asdict(me)).encode(), 0)
            return number
        raise OSError(f"no number is free in {self._folder}")

    def living(self) -> list[NodeWorker]:
        """Those whose process lives."""
        found = []
        for path in sorted(self._folder.glob("[0-9]*")):
            with contextlib.suppress(OSError, ValueError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    if not _lock(descriptor):
                        said = os.pread(descriptor, 1 << 16, 0)
                        found.append(_NODE_WORKER.validate_json(said))
                finally:
                    os.close(descriptor)
        return found


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
