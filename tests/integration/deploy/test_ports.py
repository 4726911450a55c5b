from __future__ import annotations

import os
import socket

import pytest

from baton.config.cluster import Config, load_config
from baton.errors import ConfigError
from deploy.processes.ports import choose_ports, free_port, reachable


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
