"""The worker plane: calls to workers and among them, and how both ends authenticate.

With certificates both ends prove their roles (``baton.security.peer_roles``). Without certificates,
a caller shows the cluster's token, on loopback too. Other users of the machine can reach the port,
and must not read prompts, drain workers or read KV blocks.

Each call names the caller's version of Baton and its schema. A worker refuses a caller whose schema
differs by more than one from its own.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import grpc
import grpc.aio

from baton.rpc.grpc_channel import make_server, open_channel
from baton.security.cluster_secret import worker_token
from baton.security.peer_roles import PeerRoles
from baton.security.tls import TlsFiles
from baton.version import SCHEMA, VERSION, skew_error

TOKEN_KEY = "baton-worker-token"  # noqa: S105 - the name of a piece of metadata
VERSION_KEY, SCHEMA_KEY = "baton-version", "baton-schema"
_MAX_DIGITS = 9

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerPlane:
    """The credentials that a process shows to workers. A worker also requires them of its
    callers."""

    tls: TlsFiles | None = None
    """The process's own certificate and the cluster's CA; None without certificates."""
    token: str = ""
    """Token that callers must show if there are no certificates. Empty: none is required, as in
    benchmarks of single parts."""

    @classmethod
    def of(cls, tls: TlsFiles | None, secret: str) -> Self:
        """Return the plane of a process with the files ``tls``, in the cluster whose secret is
        ``secret``."""
        return cls(tls, worker_token(secret))

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel to a worker at ``host:port``; it connects on first use.

        Raises ConfigError.
        """
        shown = [(VERSION_KEY, VERSION), (SCHEMA_KEY, str(SCHEMA))]
        if self.tls is None:
            shown.append((TOKEN_KEY, self.token))
        return _ShowingChannel(open_channel(address, self.tls, "worker"), shown)

    def server(self, *inner: grpc.aio.ServerInterceptor) -> grpc.aio.Server:
        """Return a worker's server, without services and ports. It refuses callers of other
        clusters.

        ``inner``: interceptors that see only calls of this cluster.
        """
        gate = _TokenGate(self.token) if self.tls is None else PeerRoles()
        return make_server(gates=(gate, _SchemaGate(), *inner))


OPEN_PLANE = WorkerPlane()
"""A plane without authentication: it requires no credentials and shows none."""


class _ShowingChannel(grpc.aio.Channel):
    """A channel whose calls show metadata of this process, such as its token.

    gRPC has no credentials for unencrypted connections to other machines, and its interceptors put
    a queue between a stream and its writer.
    """

    def __init__(self, channel: grpc.aio.Channel, shown: Sequence[tuple[str, str]]) -> None:
        self._channel = channel
        self._shown = tuple(shown)

    async def __aenter__(self) -> Self:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *method: Any, **options: Any) -> Any:
        return self._showing(self._channel.unary_unary(*method, **options))

    def unary_stream(self, *method: Any, **options: Any) -> Any:
        return self._showing(self._channel.unary_stream(*method, **options))

    def stream_unary(self, *method: Any, **options: Any) -> Any:
        return self._showing(self._channel.stream_unary(*method, **options))

    def stream_stream(self, *method: Any, **options: Any) -> Any:
        return self._showing(self._channel.stream_stream(*method, **options))

    def _showing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(
            *requests: Any, metadata: Sequence[tuple[str, str]] | None = None, **options: Any
        ) -> Any:
            return method(*requests, metadata=(*(metadata or ()), *self._shown), **options)

        return call


class _TokenGate(grpc.aio.ServerInterceptor):
    """Refuses calls that do not show the cluster's token."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Pass a call on if it shows the cluster's token; refuse it otherwise. See
        ``grpc.aio.ServerInterceptor``."""
        shown = dict(handler_call_details.invocation_metadata or ()).get(TOKEN_KEY, "")
        given = shown if isinstance(shown, bytes) else shown.encode(errors="replace")
        if hmac.compare_digest(given, self._token):
            return await continuation(handler_call_details)
        # The handler has this kind whatever the method's own is: no message of the call is read.
        return grpc.stream_stream_rpc_method_handler(_refuse)


class _SchemaGate(grpc.aio.ServerInterceptor):
    """Refuses calls of processes whose version of Baton is too far from this one."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Pass a call on if this process understands the caller's messages; refuse it otherwise.
        See ``grpc.aio.ServerInterceptor``."""
        shown = dict(handler_call_details.invocation_metadata or ())
        # Callers of Baton 0.1.0 show neither.
        version, schema = str(shown.get(VERSION_KEY, "")), str(shown.get(SCHEMA_KEY, "0"))
        log.debug("%s of Baton %s, schema %s", handler_call_details.method, version, schema)
        if schema.isdecimal() and len(schema) <= _MAX_DIGITS:
            why = skew_error(int(schema), version)
        else:
            why = f"the caller's schema is not a number: {schema[:_MAX_DIGITS]!r}"
        if not why:
            return await continuation(handler_call_details)

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, why)

        return grpc.stream_stream_rpc_method_handler(refuse)


async def _refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(
        grpc.StatusCode.UNAUTHENTICATED,
        "this worker only accepts calls of its own cluster: the caller has not shown the token "
        "that is derived from the cluster's secret (cluster_secret; docs/explanation/security.md)",
    )
