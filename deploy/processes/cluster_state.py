"""The state of a running cluster for other commands on its machine: a file in its run directory."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from pydantic import TypeAdapter

from baton.security.tls import TlsFiles
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.run_directory import PREFIX, parent_directory

FILE_NAME = "cluster.json"


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The addresses and processes of a cluster. Holds the store's password: keep it out of logs."""

    cluster_id: str
    run_directory: str
    model: str
    http: str
    grpc: str
    redis_url: str
    launcher: ProcessIdentity
    processes: dict[str, int]
    """Process ids by process name: the router's, the store's, and those of the workers by slot."""
    admin_http: str = ""
    """Address of metrics and the operators' endpoints, if it differs from ``http``."""
    tls: bool = False
    """Whether the listeners serve TLS."""
    authority: str = ""
    """CA file with which commands on this machine verify the listeners' certificates. Empty means
    the system's CAs."""
    certificate: str = ""
    """Client certificate file for commands on this machine, if the listeners require client
    certificates."""
    certificate_key: str = ""

    @property
    def tls_files(self) -> TlsFiles | None:
        """Return the TLS files with which this machine's commands connect to the cluster; None
        without TLS."""
        if not self.tls:
            return None
        return TlsFiles(*map(_path, (self.certificate, self.certificate_key, self.authority)))

    def save(self) -> None:
        """Write the state file, which only its owner can read. Readers see either the old or the
        new contents."""
        path = Path(self.run_directory) / FILE_NAME
        fresh = path.with_suffix(".new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(asdict(self), file, indent=2)
        fresh.replace(path)

    @property
    def operators(self) -> str:
        """Return the address of metrics and the operators' endpoints, host:port."""
        return self.admin_http or self.http

    @property
    def alive(self) -> bool:
        """Whether the launcher that wrote this file still runs."""
        return self.launcher.is_running


_CLUSTER_STATE = TypeAdapter(ClusterState)


def running_clusters() -> list[ClusterState]:
    """Return the clusters that this user runs on this machine, newest first."""
    files = parent_directory().glob(f"{PREFIX}*/{FILE_NAME}")
    states = [state for state in map(_read, files) if state is not None and state.alive]
    return sorted(states, key=lambda state: state.launcher.start_ticks, reverse=True)


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _read(path: Path) -> ClusterState | None:
    # All users can write to the directory, and another user's file could name any address.
    try:
        if path.stat().st_uid != os.getuid():
            return None
        return _CLUSTER_STATE.validate_json(path.read_bytes())
    except (OSError, ValueError):
        return None
