"""However `baton serve` ends, nothing of its cluster is left.

Clusters of other tests end in other ways: by Ctrl-C (``defaults``), amid an answer
(``rough_ground``), and by SIGKILL of the launcher (tests/e2e/test_traces.py).
"""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path

import psutil
import pytest

from tests.support.e2e.cluster import END_S, UpProcess, processes_of, told_by


def test_by_default_it_is_its_users_own(defaults: UpProcess) -> None:
    """On this machine alone, and with files that only their owner can read."""
    cluster_id, run_directory = defaults.cluster_id, Path(defaults.state.run_directory)
    names = set(told_by(cluster_id, psutil.Process.name))
    assert {"raylet", "gcs_server", "valkey-server"} <= names, names
    assert run_directory.stat().st_mode & 0o777 == 0o700
    assert (run_directory / "cluster.json").stat().st_mode & 0o777 == 0o600
    assert beyond_loopback(cluster_id) == []


def test_a_signal_during_the_start_ends_everything_with_exit_code_0() -> None:
    cluster_id = f"start-{os.getpid()}"
    with UpProcess(env={"BATON_CLUSTER_ID": cluster_id}) as up:
        up.wait_for("starting Valkey: done")
        up.terminate()
        assert up.wait() == 0, up.text
        left = [process for process in processes_of(cluster_id) if process.pid != up.process.pid]
        assert left == []


def test_a_worker_that_cannot_start_is_named_and_everything_ends(tmp_path: Path) -> None:
    """It should use a GPU that it cannot see; the reason comes from the worker."""
    file = tmp_path / "baton.toml"
    file.write_text(
        '[[pools]]\nname = "prefill"\nrole = "prefill"\n\n'
        '[[pools]]\nname = "decode"\nrole = "decode"\ndevice = "cuda"\n'
        "resources = { place = 0.5 }\n"
    )
    with UpProcess("--config", str(file), env={"CUDA_VISIBLE_DEVICES": ""}) as up:
        error = up.wait_for("error: worker decode-0: ")
        kept = Path(up.wait_for("logs are kept in ").removeprefix("logs are kept in "))
        assert up.wait() == 1, up.text
    try:
        assert len(error) < 500, error
        assert "Traceback" not in up.text
        assert "worker decode-0 has failed" in (kept / "decode-0.log").read_text()
        assert sorted(entry.name for entry in kept.parent.iterdir()) == ["logs", "run.json"]
    finally:
        shutil.rmtree(kept.parent)


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with UpProcess("--http", address) as up:
            assert up.wait() == 1
            assert f"{address} is in use" in up.text
            assert "--http" in up.text
            assert "starting" not in up.text


@pytest.mark.long
def test_the_death_of_rays_control_store_ends_the_cluster_with_a_clear_error() -> None:
    with UpProcess() as up:
        up.wait_ready()
        cluster_id, run_directory = up.cluster_id, up.state.run_directory
        store = next(p for p in processes_of(cluster_id) if p.name() == "gcs_server")
        store.kill()
        up.wait_for("error: Ray's control store has died", END_S)
        assert up.wait() == 1, up.text
        assert processes_of(cluster_id) == []
    shutil.rmtree(run_directory)


def beyond_loopback(cluster_id: str) -> list[str]:
    """Where the cluster's processes listen, if that is not loopback."""

    def beyond(process: psutil.Process) -> list[str]:
        name, found = process.name(), []
        for connection in process.net_connections(kind="inet"):
            host = getattr(connection.laddr, "ip", "")
            listens = connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
            if listens and host.removeprefix("::ffff:") not in ("127.0.0.1", "::1", ""):
                found.append(f"{name} on {host}")
        return found

    return [line for lines in told_by(cluster_id, beyond) for line in lines]
