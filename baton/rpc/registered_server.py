"""A gRPC server that finds registered methods alone, and does not read other methods' names.

gRPC's own server decodes the name of an unknown method as UTF-8, and ends for all clients if the
name is not UTF-8. One frame of any client stops it (grpcio 1.85). Registered methods are found by
gRPC's core, which compares bytes. Calls of all others arrive as calls of ``UNKNOWN``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
from grpc._cython import cygrpc

UNKNOWN = "/baton.v1/Unknown"
"""Method name that stands for every method that the server does not have."""


def registered_server(
    gates: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, int]]
) -> grpc.aio.Server:
    """Make a server as ``grpc.aio.server`` does.

    Services must register their methods, as generated code does.
    """
    server = grpc.aio.server()
    # grpc.aio.server() takes no other kind of core server.
    parts: Any = server
    core = _CoreServer(parts._loop, None, (), tuple(gates), tuple(options), None)
    core.add_registered_method_handlers({UNKNOWN: NO_SUCH_METHOD})
    parts._server = core
    return server


class _CoreServer(cygrpc.AioServer):  # type: ignore[misc]
    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """Return the next call of a registered ``method``; None stands for all other methods."""
        if method is None:
            never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            return never
        wanted = None if method == UNKNOWN.encode() else method
        found: asyncio.Future[Any] = super()._make_request_call_future(wanted)
        return found


async def _refuse(_: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "there is no such method")


NO_SUCH_METHOD: grpc.RpcMethodHandler[Any, Any] = grpc.stream_stream_rpc_method_handler(_refuse)
"""A handler that ends each call with the status ``UNIMPLEMENTED``."""
