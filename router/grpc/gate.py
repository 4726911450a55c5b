"""The public gRPC server: its bounds, and the gate that every call passes before its service.

A call that its key does not allow ends before any of its message is read. gRPC's core bounds
connections, streams and messages; the gate sees only calls.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from baton.config.cluster import Config
from baton.errors import BatonError
from baton.liveness.listening import listening
from baton.rpc.grpc_channel import make_server
from baton.rpc.grpc_errors import grpc_boundary
from baton.rpc.registered_server import UNKNOWN
from baton.telemetry.logs import of_request
from router.access.access import Access, scope_of_service
from router.access.api_keys import check_one_credential
from router.access.audit import Refusals
from router.grpc.call import (
    Context,
    message_is_late,
    message_of,
    metadata_of,
    request_id_of,
)

MAX_STREAMS = 1024
"""Maximum number of calls at a time on one connection. Further calls wait in the client."""
_SLACK_BYTES = 64 << 10
"""Bytes by which gRPC's limit on message size exceeds the configured one. The service itself
rejects a message in this range, with an error that names the limit."""
_UNREAD_BYTES = 16 << 10
"""Number of bytes that gRPC buffers for a call whose message is not read."""
_IDLE_S = 300.0
_AGE_S = 3600.0
"""Seconds after its start at which a connection takes no more new calls. A connection without calls
ends after ``_IDLE_S`` seconds. Clients reconnect by themselves."""
_GRACE_S = 60.0
"""Seconds, in addition to the deadline of a request, for which calls on an old connection may
continue before it is closed."""


def make_public_server(access: Access, config: Config) -> grpc.aio.Server:
    """Create the server of the router's gRPC listener, without services and ports."""
    head_s = config.advanced.head_deadline_s
    seconds = {
        "grpc.server_handshake_timeout_ms": head_s,
        "grpc.max_connection_idle_ms": _IDLE_S,
        "grpc.max_connection_age_ms": _AGE_S,
        "grpc.max_connection_age_grace_ms": config.request_deadline_s + _GRACE_S,
    }
    bounds = {
        **{name: int(limit * 1000) for name, limit in seconds.items()},
        "grpc.max_allowed_incoming_connections": config.advanced.max_connections,
        "grpc.max_concurrent_streams": MAX_STREAMS,
        "grpc.max_receive_message_length": config.max_body_bytes + _SLACK_BYTES,
        "grpc.http2.lookahead_bytes": _UNREAD_BYTES,
        # gRPC's bandwidth probe would raise the buffered unread bytes to megabytes.
        "grpc.http2.bdp_probe": 0,
    }
    gate = GrpcGate(access, config.request_deadline_s)
    return make_server(shares_port=config.routers > 1, gates=(gate,), bounds=bounds)


class GrpcGate(grpc.aio.ServerInterceptor):
    """Rejects calls that the caller's API key does not allow, including calls of unknown
    methods."""

    def __init__(self, access: Access, message_s: float) -> None:
        """Create a gate. ``message_s``: seconds that a client has to send a call's message."""
        self._access = access
        self._refusals = Refusals(access)
        self._message_s = message_s

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Check the API key of a call before the call's handler runs. This implements
        ``grpc.aio.ServerInterceptor``."""
        service = handler_call_details.method.rpartition("/")[0].lstrip("/")
        unknown = handler_call_details.method == UNKNOWN
        needed = "inference" if unknown else scope_of_service(service)
        if needed is not None:
            metadata = handler_call_details.invocation_metadata or ()
            given = [(name, value) for name, value in metadata if isinstance(value, str)]
            try:
                check_one_credential(given)
                self._access.check(dict(given), needed)
            except BatonError as error:
                return self._refusing(error, handler_call_details.method, dict(given))
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        return _bounded(handler, self._message_s)

    def _refusing(
        self, error: BatonError, method: str, metadata: Mapping[str, str]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Return a handler that ends a call with ``error``.

        The handler is a streaming one, whatever the type of the method. Clients cannot tell the
        difference. gRPC reads the messages of a stream only when the handler asks for them."""

        async def refuse(_: AsyncIterator[bytes], context: Context) -> None:
            self._refusals.add(
                error,
                metadata,
                action=method,
                client=context.peer(),
                request_id=request_id_of(metadata),
            )
            async with grpc_boundary(context):
                raise error

        return grpc.stream_stream_rpc_method_handler(refuse)


def _bounded(
    handler: grpc.RpcMethodHandler[Any, Any], message_s: float
) -> grpc.RpcMethodHandler[Any, Any]:
    """Wrap a handler that reads one message. The wrapper adds a deadline, an error for an invalid
    message, and the client's id of the call in the log.
    """
    streams = handler.response_streaming
    method: Any = handler.unary_stream if streams else handler.unary_unary
    parse: Any = handler.request_deserializer

    async def serve(_: AsyncIterator[Any], context: Context) -> None:
        with of_request(request_id=request_id_of(metadata_of(context))):
            await answer(context)

    async def answer(context: Context) -> None:
        async with grpc_boundary(context):
            try:
                async with listening(message_s):
                    message = await message_of(context, parse)
            except TimeoutError:
                raise message_is_late() from None
        if not streams:
            await context.write(await method(message, context))
        elif inspect.isasyncgenfunction(method):
            async for response in method(message, context):
                await context.write(response)
        else:
            await method(message, context)

    return grpc.stream_stream_rpc_method_handler(
        serve, response_serializer=handler.response_serializer
    )
