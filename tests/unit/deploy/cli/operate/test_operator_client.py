"""Commands that ask a router, where the address is bad or another server answers there."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from deploy.cli.options.exit_codes import ExitCode
from tests.support.deploy.machine import Machine, machine

HTML, JSON, EVENTS = "text/html", "application/json", "text/event-stream"
COMMANDS = [
    ["status"],
    ["status", "--watch"],
    ["status", "--watch", "--output", "json"],
    ["drain", "decode-0", "--yes"],
    ["scale", "decode", "2", "--yes"],
]


@pytest.fixture
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    tmp_path_factory.getbasetemp()
    with machine() as made:
        yield made


@contextmanager
def server(kind: str, body: str, status: int = 200) -> Iterator[str]:
    """host:port of one that gives every request the same answer."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.1:{made.server_port}"
        made.shutdown()
        thread.join()


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (HTML, "<html><body>It works!</body></html>"),
        (JSON, "{}"),
        (JSON, "[1]"),
        (JSON, '{"id": "x", "workers": 3}'),
    ],
)
def test_another_server_is_reported_in_one_line(
    here: Machine, command: list[str], kind: str, body: str
) -> None:
    with server(kind, body) as address:
        result = here.run(*command, "--http", address)
    assert result.exit_code == ExitCode.FAILED, repr(result.exception)
    (line,) = result.stderr.splitlines()
    assert f"{address} is not a Baton router" in line


@pytest.mark.parametrize("data", ["words", "[1]", '{"error": 3}'])
def test_another_stream_of_events_is_reported(here: Machine, data: str) -> None:
    with server(EVENTS, f"data: {data}\n\n") as address:
        result = here.run("status", "--watch", "--http", address)
    assert result.exit_code == ExitCode.FAILED, repr(result.exception)
    assert f"{address} is not a Baton router" in result.stderr


def test_a_proxy_without_a_router_behind_it_is_unhealthy(here: Machine) -> None:
    with server(HTML, "<html>bad gateway</html>", 502) as address:
        result = here.run("status", "--http", address)
    assert result.exit_code == ExitCode.UNHEALTHY, repr(result.exception)
    assert f"router {address}: HTTP 502" in result.stdout


def test_a_listener_without_metrics_is_reported(here: Machine) -> None:
    with server(JSON, '{"status": "ok"}', 404) as address:
        result = here.run("status", "--http", address)
    assert result.exit_code == ExitCode.FAILED, repr(result.exception)
    assert "at its admin_http" in result.stderr


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize(
    "address", ["foo:bar", "http://", "[::1", "ftp://here:1", "127.0.0.1:99999"]
)
def test_a_bad_address_is_an_error_of_usage(
    here: Machine, command: list[str], address: str
) -> None:
    result = here.run(*command, "--http", address)
    assert result.exit_code == ExitCode.USAGE, repr(result.exception)
    (line,) = result.stderr.splitlines()
    assert "is not an address of a router" in line
    assert "HOST:PORT" in line
