"""A page of metrics over TLS: which clients may read it, and that none can block the others."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter

from baton.security.tls import PeerRole, TlsFiles, client_context, role_name
from baton.telemetry.metrics_server import MetricsServer
from tests.support.certificates import Authority

DEADLINE_S = 20.0


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def server(authority: Authority) -> Iterator[MetricsServer]:
    registry = CollectorRegistry()
    Counter("seen", "Things.", registry=registry).inc()
    started = MetricsServer("127.0.0.1", registry, TlsFiles.in_folder(authority.folder, "worker"))
    yield started
    started.stop()


def ask(server: MetricsServer, files: TlsFiles, scheme: str = "https") -> httpx.Response:
    with httpx.Client(trust_env=False, verify=client_context(files), timeout=DEADLINE_S) as client:
        named = {"sni_hostname": role_name("worker")}
        return client.get(f"{scheme}://127.0.0.1:{server.port}/metrics", extensions=named)


def shown_by(server: MetricsServer, authority: Authority) -> bytes | None:
    """The certificate that new connections get."""
    context = client_context(TlsFiles.in_folder(authority.folder, "router"))
    address = "127.0.0.1", server.port
    with (
        socket.create_connection(address, DEADLINE_S) as plain,
        context.wrap_socket(plain, server_hostname=role_name("worker")) as connection,
    ):
        return connection.getpeercert(binary_form=True)


@pytest.mark.parametrize("role", ["router", "supervisor", "monitor"])
def test_readers(server: MetricsServer, authority: Authority, role: PeerRole) -> None:
    answer = ask(server, TlsFiles.in_folder(authority.folder, role))
    assert answer.status_code == httpx.codes.OK
    assert "seen_total 1.0" in answer.text


@pytest.mark.parametrize("role", ["client", "worker"])
def test_others_of_the_cluster(server: MetricsServer, authority: Authority, role: PeerRole) -> None:
    answer = ask(server, TlsFiles.in_folder(authority.folder, role))
    assert answer.status_code == httpx.codes.FORBIDDEN
    assert "seen" not in answer.text


def test_strangers(server: MetricsServer, authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path, "other").sign("stranger", "router")
    for files in (
        TlsFiles(authority=authority.certificate),
        TlsFiles(other.certificate, other.key, authority.certificate),
    ):
        with pytest.raises(httpx.TransportError):
            ask(server, files)
    with pytest.raises(httpx.TransportError):
        ask(server, TlsFiles(), "http")


def test_a_silent_connection_blocks_no_other(server: MetricsServer, authority: Authority) -> None:
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S):
        answer = ask(server, TlsFiles.in_folder(authority.folder, "router"))
        assert answer.status_code == httpx.codes.OK


def test_renewed_certificates_are_taken_up(server: MetricsServer, authority: Authority) -> None:
    first = shown_by(server, authority)
    assert shown_by(server, authority) == first
    authority.sign("worker")
    assert shown_by(server, authority) != first
    answer = ask(server, TlsFiles.in_folder(authority.folder, "router"))
    assert answer.status_code == httpx.codes.OK


def test_the_first_free_port_is_taken() -> None:
    first = MetricsServer("127.0.0.1", CollectorRegistry())
    second = MetricsServer("127.0.0.1", CollectorRegistry(), None, (first.port, 0))
    try:
        assert second.port not in (0, first.port)
        with pytest.raises(OSError, match="in use"):
            MetricsServer("127.0.0.1", CollectorRegistry(), None, (first.port, second.port))
    finally:
        first.stop()
        second.stop()
