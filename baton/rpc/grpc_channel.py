"""Makes gRPC channels and servers, with the same limits and keepalive everywhere."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from baton.errors import ConfigError
from baton.liveness.silence import STANDSTILL_S
from baton.rpc.registered_server import registered_server
from baton.security.tls import PeerRole, Renewal, TlsFiles, role_name

Part = TypeVar("Part", bound=Message)

MESSAGE_LIMIT = 64 << 20
"""Maximum bytes of one message, in both directions. gRPC's default of 4 MiB is too small for long
prompts."""
GATHERED_BYTES = 4 << 20
"""Maximum size in bytes of a message that joins several parts. Without this maximum, one message
with all parts queued for a slow or stopped peer could exceed the gRPC limit. A message of a single
part may be larger."""

_OPTIONS: list[tuple[str, int]] = [
    ("grpc.max_receive_message_length", MESSAGE_LIMIT),
    ("grpc.max_send_message_length", MESSAGE_LIMIT),
]
_NO_BOUNDS: Mapping[str, int] = MappingProxyType({})
_CONNECT_MS, _HANDSHAKE_MS = 1_000, 2_000
"""Time limits for making a connection without TLS and with TLS, in milliseconds. TLS adds two round
trips and some computation. On a busy machine 0.1 s is too short, and the caller would see an
unreachable peer. A port without a listener is detected immediately in any case."""
PING_TIMEOUT_MS = int(1.5 * STANDSTILL_S * 1e3)
"""Time without an answer to a ping after which a peer counts as gone, in milliseconds. It is longer
than any pause, since a peer that stands still returns, and since gRPC's timer may fire before an
answer is read. ``SilenceWatch`` finds a silent process much sooner."""
_SERVER_OPTIONS = [
    *_OPTIONS,
    # Only the bit of "identity" is set: a compressed message of some kB may expand to gigabytes.
    ("grpc.compression_enabled_algorithms_bitset", 1),
    # Every ping is accepted. A call may wait for a long prompt and send nothing for a minute, or
    # end just before a ping is sent. A server that counts pings closes the connection of such a
    # client.
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]
CLIENT_PING_MS, SERVER_PING_MS = 10_000, 30_000
"""Intervals between two pings of a client and of a server, in milliseconds. A peer whose machine is
gone, or that reads nothing any more, is disconnected after this time and ``PING_TIMEOUT_MS``.
Without pings, calls to it would never end."""


def by_size(parts: Iterable[Part], max_bytes: int = GATHERED_BYTES) -> Iterator[list[Part]]:
    """Group parts into messages of up to ``max_bytes`` each, in order.

    No message is empty. A part that is larger than ``max_bytes`` has a message of its own.
    """
    gathered: list[Part] = []
    size = 0
    for part in parts:
        size += part.ByteSize()
        if gathered and size > max_bytes:
            yield gathered
            gathered, size = [], part.ByteSize()
        gathered.append(part)
    if gathered:
        yield gathered


def open_channel(
    address: str, tls: TlsFiles | None = None, peer: PeerRole | None = None
) -> grpc.aio.Channel:
    """Return a channel to ``host:port``; it connects on first use. Raises ConfigError.

    ``peer`` is the role that the server's certificate must name. If ``peer`` is None, the
    certificate must name the host.
    """
    if tls is None:
        return grpc.aio.insecure_channel(address, options=_client_options())
    return grpc.aio.secure_channel(address, _client_credentials(tls), options=_towards(peer))


def open_blocking_channel(
    address: str, tls: TlsFiles | None = None, peer: PeerRole | None = None
) -> grpc.Channel:
    """Return a blocking channel, for threads and programs without an event loop. Arguments and
    errors are those of ``open_channel``."""
    if tls is None:
        return grpc.insecure_channel(address, options=_client_options())
    return grpc.secure_channel(address, _client_credentials(tls), options=_towards(peer))


def make_server(
    *,
    shares_port: bool = False,
    gates: Sequence[grpc.aio.ServerInterceptor] = (),
    bounds: Mapping[str, int] = _NO_BOUNDS,
) -> grpc.aio.Server:
    """Make a server without services and ports. ``shares_port``: other servers may share its port.

    Every call passes the interceptors ``gates`` first. ``bounds`` are options of gRPC's core, by
    name. They replace the options of servers within the cluster. Services are found only if they
    register their methods.
    """
    options = {**dict(_server_options(shares_port=shares_port)), **bounds}
    return registered_server(gates, [*options.items()])


def listen(server: grpc.aio.Server | grpc.Server, address: str, tls: TlsFiles | None = None) -> int:
    """Make a server listen on ``host:port``, and return the port. Raises ConfigError.

    If ``tls`` has a CA, clients must show a certificate of that CA.
    """
    try:
        if tls is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, _server_credentials(tls))
    except (RuntimeError, OSError) as error:
        raise ConfigError(f"cannot listen on {address}: {error}") from error


def make_blocking_server(
    threads: ThreadPoolExecutor, address: str, tls: TlsFiles | None = None
) -> tuple[grpc.Server, int]:
    """Return a threaded server without services, and its port. Raises ConfigError."""
    server = grpc.server(threads, options=_server_options())
    return server, listen(server, address, tls)


def _client_credentials(tls: TlsFiles) -> grpc.ChannelCredentials:
    tls.check()
    key = None if tls.key is None else tls.key.read_bytes()
    shown = None if tls.certificate is None else tls.certificate.read_bytes()
    trusted = None if tls.authority is None else tls.authority.read_bytes()
    return grpc.ssl_channel_credentials(trusted, key, shown)


def _towards(peer: PeerRole | None) -> list[tuple[str, Any]]:
    slower = {"grpc.min_reconnect_backoff_ms": _HANDSHAKE_MS}
    options: list[tuple[str, Any]] = [*(dict(_client_options()) | slower).items()]
    if peer is not None:
        options.append(("grpc.ssl_target_name_override", role_name(peer)))
    return options


def _server_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Return credentials that check at each handshake whether the files were renewed."""
    renewal = Renewal(tls)
    tls.check()

    def read() -> grpc.ServerCertificateConfiguration:
        assert tls.certificate is not None, "a server has a certificate"
        assert tls.key is not None, "a server has a key"
        pair = tls.key.read_bytes(), tls.certificate.read_bytes()
        trusted = None if tls.authority is None else tls.authority.read_bytes()
        return grpc.ssl_server_certificate_configuration([pair], trusted)

    def renewed() -> Any:
        return read() if renewal.came() else None

    return grpc.dynamic_ssl_server_credentials(read(), renewed, tls.authority is not None)


def _client_options() -> list[tuple[str, int]]:
    return [
        *_OPTIONS,
        # A ping's timeout is a minute unless it is set. A client that sends no data, because it
        # waits for answers, may ping only once a minute unless that limit is lifted.
        ("grpc.keepalive_time_ms", CLIENT_PING_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Despite its name, this option is also the time limit of a connection attempt.
        ("grpc.min_reconnect_backoff_ms", _CONNECT_MS),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    ]


def _server_options(*, shares_port: bool = False) -> list[tuple[str, int]]:
    return [
        *_SERVER_OPTIONS,
        ("grpc.keepalive_time_ms", SERVER_PING_MS),
        ("grpc.keepalive_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", PING_TIMEOUT_MS),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.so_reuseport", int(shares_port)),
    ]
