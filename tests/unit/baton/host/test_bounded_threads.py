"""Silent clients keep no other client out of a small server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from socketserver import BaseRequestHandler, TCPServer

import pytest

from baton.host.bounded_threads import BoundedThreads

DEADLINE_S = 20.0


class Echo(BaseRequestHandler):
    def handle(self) -> None:
        self.request.settimeout(DEADLINE_S)
        while heard := self.request.recv(100):
            self.request.sendall(heard)


class Server(BoundedThreads, TCPServer):
    CONNECTIONS = 3


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Echo) as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join(DEADLINE_S)


def connect(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.server_address[1]), DEADLINE_S)


def asks(connection: socket.socket) -> bytes:
    connection.sendall(b"?")
    return connection.recv(100)


def test_a_new_connection_ends_the_oldest_one(server: Server) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(3)]
        assert [asks(one) for one in silent] == [b"?"] * 3
        newest = stack.enter_context(connect(server))
        assert asks(newest) == b"?"
        assert silent[0].recv(100) == b""
        assert [asks(one) for one in silent[1:]] == [b"?"] * 2


def test_many_silent_connections_have_few_threads(server: Server) -> None:
    before = threading.active_count()
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(server)) for _ in range(50)]
        assert asks(stack.enter_context(connect(server))) == b"?"
        for one in silent[:48]:
            assert one.recv(100) == b""
        # Threads of ended connections may still be on their way out.
        ended = threading.Event()
        for _ in range(1000):
            if threading.active_count() <= before + 3:
                break
            ended.wait(0.02)
        assert threading.active_count() <= before + 3
