from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.config.cluster import Config, load_config
from baton.errors import ConfigError
from deploy.processes import cluster_state
from deploy.processes.cluster_state import ClusterState
from deploy.processes.ports import choose_ports, free_port, reachable
from deploy.processes.process_identity import ProcessIdentity
from deploy.processes.run_directory import PREFIX, ClusterMark


def config(http: str, grpc: str) -> Config:
    return load_config(http=http, grpc=grpc)


def test_free_ports_stay_and_port_0_becomes_a_free_one() -> None:
    http = f"127.0.0.1:{free_port()}"
    chosen = choose_ports(config(http, "127.0.0.1:0"))
    assert chosen.http == http
    assert chosen.grpc.startswith("127.0.0.1:")
    assert not chosen.grpc.endswith(":0")


def test_a_port_in_use_is_named_with_its_flag_and_its_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as failure:
            choose_ports(config("127.0.0.1:0", f"127.0.0.1:{port}"))
    message = str(failure.value)
    assert f"127.0.0.1:{port} is in use" in message
    assert "--grpc" in message
    assert f"pid {os.getpid()}" in message


def test_a_port_that_was_just_closed_is_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
        with socket.create_connection(address) as client, server.accept()[0] as accepted:
            accepted.close()  # the server's side closes first and lingers in TIME_WAIT
            assert client.recv(1) == b""
    chosen = choose_ports(config(f"127.0.0.1:{address[1]}", "127.0.0.1:0"))
    assert chosen.http == f"127.0.0.1:{address[1]}"


def test_one_port_for_both_fronts_is_refused() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(ConfigError, match="are both"):
        choose_ports(config(address, address))


def test_a_host_that_is_not_here_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:8000 .*--http"):
        choose_ports(config("192.0.2.1:8000", "127.0.0.1:0"))


def test_a_server_on_every_interface_is_reached_over_loopback() -> None:
    assert reachable("0.0.0.0:80") == "127.0.0.1:80"
    assert reachable("[::]:80") == "[::1]:80"
    assert reachable("127.0.0.1:80") == "127.0.0.1:80"


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[tuple[int, ProcessIdentity]]:
    """A port at which a process of a cluster listens, and the process."""
    mark = ClusterMark("c7", tmp_path / f"{PREFIX}7")
    mark.run_directory.mkdir()
    listen = (
        "import socket,sys;s=socket.create_server(('127.0.0.1',0));"
        "print(s.getsockname()[1],flush=True);sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", listen],
        env=mark.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        yield int(process.stdout.readline()), ProcessIdentity.of(process.pid)
        process.communicate()


def test_a_port_of_an_own_cluster_names_the_cluster_and_what_to_do(
    taken: tuple[int, ProcessIdentity], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_state, "parent_directory", lambda: tmp_path)
    port, process = taken
    http = f"127.0.0.1:{port}"
    with pytest.raises(ConfigError) as failure:
        choose_ports(config(http, "127.0.0.1:0"))
    starting = failure.value.message
    assert f"{http} is in use by your cluster c7, which starts or ends" in starting
    assert str(tmp_path / f"{PREFIX}7" / "logs") in starting
    run = str(tmp_path / f"{PREFIX}7")
    ClusterState("c7", run, "tiny", http, "127.0.0.1:2", "redis://", process, {}).save()
    with pytest.raises(ConfigError) as failure:
        choose_ports(config(http, "127.0.0.1:0"))
    assert failure.value.message == (
        f"{http} is in use by your cluster c7, which serves tiny at {http}: use that one, or stop "
        f"it with `kill {process.pid}`, or choose another port with --http HOST:PORT"
    )
