"""Factories for gRPC channels and servers, so that limits and keepalive are alike everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from baton.errors import ConfigError

MESSAGE_LIMIT = 64 << 20
"""Bytes of one message, both ways; gRPC's own default of 4 MiB is too small for long prompts."""

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
]
_CLIENT_OPTIONS = [
    *_OPTIONS,
    # A peer that hangs, with its connections open, is noticed after 15 s at most. A ping's own
    # timeout is a minute unless it is set, and a client that sends no data, because it waits for
    # answers, may ping but once a minute unless that bound is lifted.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
]
_SERVER_OPTIONS = [
    *_OPTIONS,
    # The bit of "identity" alone: a compressed message of some kB may unfold to gigabytes.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Every ping is welcome: a call may wait for a long prompt and send nothing for a minute, or end
    # just before a ping is sent. A server that counts pings ends the connection of such a client.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
SERVER_PING_MS, SERVER_PING_TIMEOUT_MS = 30_000, 20_000
"""A client whose machine has gone, or that reads nothing any more, is cut off after their sum: its
calls would wait for it for ever."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for mutual TLS: each side shows its certificate, and trusts the authority's."""

    certificate: Path
    key: Path
    authority: Path


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to ``host:port``; it connects on first use."""
    return grpc.aio.insecure_channel(address, options=_CLIENT_OPTIONS)


def open_blocking_channel(address: str, tls: TlsFiles | None = None) -> grpc.Channel:
    """As ``open_channel``, for threads and programs without an event loop."""
    if tls is None:
        return grpc.insecure_channel(address, options=_CLIENT_OPTIONS)
    credentials = grpc.ssl_channel_credentials(
        tls.authority.read_bytes(), tls.key.read_bytes(), tls.certificate.read_bytes()
    )
    return grpc.secure_channel(address, credentials, options=_CLIENT_OPTIONS)


def make_server(
    *, shares_port: bool = False, gates: Sequence[grpc.aio.ServerInterceptor] = ()
) -> grpc.aio.Server:
    """A server without services and ports. ``shares_port``: others may listen on the same one.

    Every call passes the ``gates`` first.
    """
    return grpc.aio.server(interceptors=gates, options=_server_options(shares_port=shares_port))


def make_blocking_server(
    threads: ThreadPoolExecutor, address: str, tls: TlsFiles | None = None
) -> tuple[grpc.Server, int]:
    """A server on threads without services, and its port. Raises ConfigError."""
    server = grpc.server(threads, options=_server_options())
    try:
        if tls is None:
            return server, server.add_insecure_port(address)
        pairs = [(tls.key.read_bytes(), tls.certificate.read_bytes())]
        credentials = grpc.ssl_server_credentials(
            pairs, tls.authority.read_bytes(), require_client_auth=True
        )
        return server, server.add_secure_port(address, credentials)
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"nothing can listen on {address}: {error}") from error


def _server_options(*, shares_port: bool = False) -> list[tuple[str, int]]:
    return [
        *_SERVER_OPTIONS,
        ("grpc.keepalive_time_ms", SERVER_PING_MS),
        ("grpc.keepalive_timeout_ms", SERVER_PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", SERVER_PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", int(shares_port)),
    ]
