"""A machine with some clusters, as commands find them, and a terminal to run commands in."""

from __future__ import annotations

import os
import pty
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from deploy.cli.main import app
from deploy.processes.cluster_state import ClusterState
from deploy.processes.process_identity import ProcessIdentity

DEADLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Machine:
    """Its run directories lie in a folder of its own."""

    folder: Path

    def add(
        self, cluster_id: str, http: str, processes: Mapping[str, int] | None = None
    ) -> ClusterState:
        """A cluster of this user, whose launcher is this process."""
        run = self.folder / f"baton-{cluster_id}"
        run.mkdir()
        state = ClusterState(
            cluster_id=cluster_id,
            run_directory=str(run),
            model="tiny",
            http=http,
            grpc="127.0.0.1:1",
            redis_url="redis://127.0.0.1:1/0",
            launcher=ProcessIdentity.own(),
            processes=dict(processes or {}),
        )
        state.save()
        return state

    def change(self, state: ClusterState, processes: Mapping[str, int]) -> None:
        """The cluster has other processes now."""
        replace(state, processes=dict(processes)).save()

    def give_away(self, state: ClusterState, uid: int = 12345) -> None:
        """Another user has started the cluster; this process must be root's."""
        for path in (Path(state.run_directory), *Path(state.run_directory).iterdir()):
            os.chown(path, uid, uid)

    def run(self, *arguments: str) -> Result:
        """`baton` without a terminal."""
        return CliRunner(env={"BATON_API_KEY": None}).invoke(app, list(arguments))

    def run_in_terminal(self, *arguments: str, answer: str) -> tuple[int, str]:
        """`baton` in a terminal whose user answers the first question; exit code and output."""
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            [sys.executable, "-m", "baton", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env=os.environ | {"TMPDIR": str(self.folder), "TERM": "dumb"},
        )
        os.close(theirs)
        output, answered = "", False
        try:
            # Reading fails once the process has closed its end.
            with suppress(OSError):
                while piece := os.read(ours, 1 << 16):
                    output += piece.decode(errors="replace")
                    if "[y/N]" in output and not answered:
                        answered = True
                        os.write(ours, answer.encode())
            return process.wait(DEADLINE_S), output.replace("\r\n", "\n")
        finally:
            process.kill()
            process.wait(DEADLINE_S)
            os.close(ours)


@contextmanager
def machine() -> Iterator[Machine]:
    """One without clusters. Names of run directories are short, for the sake of sockets."""
    folder = Path(tempfile.mkdtemp(prefix="bm-", dir="/tmp"))
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(folder))
            yield Machine(folder)
    finally:
        shutil.rmtree(folder)
