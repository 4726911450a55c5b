from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.chaos.harness.packet_filter import attach, detach, losing, take_socket

SILENT_S = 0.3
DEADLINE_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket, socket.socket]]:
    """A listening socket, and both ends of a connection to it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=DEADLINE_S)
        far, _ = server.accept()
        far.settimeout(DEADLINE_S)
        with closing(near), closing(far):
            yield server, near, far


def taken(one: socket.socket) -> socket.socket:
    try:
        return take_socket(os.getpid(), one.fileno())
    except PermissionError as error:
        pytest.skip(f"a socket of another process cannot be had here: {error}")


def test_what_is_sent_does_not_arrive_until_the_filter_goes(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    _, near, far = pair
    with taken(far) as other:
        attach(other, losing(1.0))
        near.sendall(b"lost for now")
        far.settimeout(SILENT_S)
        with pytest.raises(TimeoutError):
            far.recv(100)
        detach(other)
        far.settimeout(DEADLINE_S)
        assert far.recv(100) == b"lost for now"


def test_a_socket_that_drops_packets_accepts_no_connection(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    server, _, _ = pair
    with taken(server) as other:
        attach(other, losing(1.0))
        with pytest.raises(TimeoutError):
            socket.create_connection(server.getsockname(), timeout=SILENT_S)
        detach(other)
        socket.create_connection(server.getsockname(), timeout=DEADLINE_S).close()


def test_where_some_packets_are_lost_everything_arrives_in_the_end(
    pair: tuple[socket.socket, socket.socket, socket.socket],
) -> None:
    _, near, far = pair
    with taken(far) as other:
        attach(other, losing(0.2))
        for number in range(20):
            near.sendall(bytes([number]))
        got = b""
        while len(got) < 20:
            got += far.recv(100)
    assert got == bytes(range(20))
