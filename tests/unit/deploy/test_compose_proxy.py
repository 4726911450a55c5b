"""nginx, as deploy/compose/ sets it up, in front of what answers bit by bit."""

from __future__ import annotations

import http.client
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_health.v1.health import HealthServicer  # type: ignore[import-untyped]

from deploy.processes.ports import free_port
from router.access.access import _BY_PREFIX, _INFERENCE_SERVICES, _OPEN_SERVICES
from tests.support.programs import nginx

FILE = Path(__file__).parents[3] / "deploy" / "compose" / "nginx.conf"
_DEADLINE_S = 20.0


@dataclass(frozen=True, slots=True)
class Proxy:
    """Its two ports, and what the server behind it waits for."""

    http: int
    grpc: int
    go_on: threading.Event
    gone: threading.Event


class _Stream(BaseHTTPRequestHandler):
    """An answer whose second part comes when the client has told that it has the first."""

    protocol_version = "HTTP/1.1"
    go_on: threading.Event
    gone: threading.Event

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        try:
            self._part(b"first")
            self.go_on.wait(_DEADLINE_S)
            while self.path == "/v1/responses/endless":
                self._part(b"more")
                time.sleep(0.01)
            self._part(b"second")
            self._part(b"")
        except OSError:
            self.gone.set()

    def _part(self, text: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))

    def log_message(self, *_: object) -> None: ...


@contextmanager
def behind(handler: type[_Stream]) -> Iterator[tuple[int, int]]:
    """The ports of an HTTP and a gRPC server."""
    with (
        ThreadingHTTPServer(("127.0.0.1", 0), handler) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        serving = threading.Thread(target=server.serve_forever, args=(0.02,))
        serving.start()
        calls = grpc.server(threads)
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), calls)
        port = calls.add_insecure_port("127.0.0.1:0")
        calls.start()
        try:
            yield server.server_port, port
        finally:
            calls.stop(None).wait(_DEADLINE_S)
            server.shutdown()
            serving.join()


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    folder = tmp_path_factory.mktemp("nginx")
    go_on, gone = threading.Event(), threading.Event()
    handler = type("Handler", (_Stream,), {"go_on": go_on, "gone": gone})
    with behind(handler) as (http_port, grpc_port):
        proxy = Proxy(free_port(), free_port(), go_on, gone)
        file = folder / "nginx.conf"
        file.write_text(_here(proxy, http_port, grpc_port, folder))
        command = [nginx(), "-p", str(folder), "-c", str(file), "-g", "daemon off;"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
            try:
                _listening(server, proxy.http)
                yield proxy
            finally:
                go_on.set()
                server.terminate()
                assert server.wait(_DEADLINE_S) == 0


def _here(proxy: Proxy, http_port: int, grpc_port: int, folder: Path) -> str:
    """The file with addresses and folders of this test."""
    text = FILE.read_text()
    # The older spelling, which newer ones take too.
    text, count = re.subn(
        r"listen 8081;\s*http2 on;", f"listen 127.0.0.1:{proxy.grpc} http2;", text
    )
    assert count == 1
    # Older ones resolve names once, which is for those of Compose's networks.
    text = re.sub(r"(?m)^ *(include /tmp/resolver.conf|zone .*);$", "", text)
    for old, new in (
        ("listen 8080;", f"listen 127.0.0.1:{proxy.http};"),
        ("server router:8000 resolve;", f"server 127.0.0.1:{http_port};"),
        ("server router:8001 resolve;", f"server 127.0.0.1:{grpc_port};"),
        ("worker_processes auto;", "worker_processes 1;"),
        ("/tmp/", f"{folder}/"),
    ):
        assert old in text
        text = text.replace(old, new)
    return text


def _listening(server: subprocess.Popen[bytes], port: int) -> None:
    end = time.monotonic() + _DEADLINE_S
    while True:
        assert server.poll() is None, "nginx has ended: it refuses its file"
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_DEADLINE_S)
        try:
            connection.connect()
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.02)
        else:
            connection.close()
            return


@contextmanager
def asked(proxy: Proxy, path: str) -> Iterator[http.client.HTTPResponse]:
    """The answer to a GET, while it comes; the client hangs up in the end."""
    connection = http.client.HTTPConnection("127.0.0.1", proxy.http, timeout=_DEADLINE_S)
    with closing(connection):
        connection.request("GET", path)
        with connection.getresponse() as answer:
            yield answer


def test_a_part_is_passed_on_before_the_next_one_is_made(proxy: Proxy) -> None:
    proxy.go_on.clear()
    with asked(proxy, "/v1/responses/stream") as answer:
        assert answer.read1(100) == b"first"
        proxy.go_on.set()
        assert answer.read() == b"second"


def test_baton_learns_of_a_client_that_disconnects(proxy: Proxy) -> None:
    proxy.go_on.clear()
    proxy.gone.clear()
    with asked(proxy, "/v1/responses/endless") as answer:
        assert answer.read1(100) == b"first"
    proxy.go_on.set()
    assert proxy.gone.wait(_DEADLINE_S)


def _passes(path: str) -> bool:
    """Whether a location of the file that passes requests on has the path."""
    patterns = re.findall(r"location ~ (\S+) \{\s*(?:proxy|grpc)_pass ", FILE.read_text())
    assert len(patterns) == 2
    return any(re.search(pattern, path) for pattern in patterns)


def test_inference_alone_is_passed_on() -> None:
    """By the router's own table of scopes."""
    paths = {path for path in _BY_PREFIX if _passes(path)}
    assert paths == {path for path, scope in _BY_PREFIX.items() if scope == "inference"}
    for path in ("/v1/workers/decode-0/drain", "/v1/pools/decode/scale", "/v1/modelsx", "/new"):
        assert not _passes(path), path
    assert _passes("/v1/files/file-1/content")
    services = (*_INFERENCE_SERVICES, *_OPEN_SERVICES)
    assert all(_passes(f"/{service}/Method") for service in services)
    for service in ("OperatorService", "WorkerOperatorService", "ControlService"):
        assert not _passes(f"/baton.v1.{service}/Method"), service


@pytest.mark.parametrize("path", ["/metrics?a=b", "/console", "/v1/cluster"])
def test_operators_paths_are_not_for_the_world(proxy: Proxy, path: str) -> None:
    proxy.go_on.set()
    with asked(proxy, path) as answer:
        assert answer.status == 404


def test_grpc_comes_through(proxy: Proxy) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{proxy.grpc}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        answer = stub.Check(request, timeout=_DEADLINE_S, wait_for_ready=True)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
