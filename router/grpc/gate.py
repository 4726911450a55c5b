"""What every call of the gRPC API passes before its service sees it: its key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from baton.errors import BatonError
from baton.rpc.grpc_errors import grpc_boundary
from router.access.access import Access, scope_of_service

Context = grpc.aio.ServicerContext[Any, Any]


class GrpcGate(grpc.aio.ServerInterceptor):
    """Refuses calls that their key does not allow; of methods that are not there, too."""

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """See ``grpc.aio.ServerInterceptor``."""
        service = handler_call_details.method.rpartition("/")[0].lstrip("/")
        needed = scope_of_service(service)
        handler = await continuation(handler_call_details)
        if needed is None:
            return handler
        metadata = handler_call_details.invocation_metadata or ()
        given = {name: value for name, value in metadata if isinstance(value, str)}
        try:
            self._access.check(given, needed)
        except BatonError as error:
            return _refusing(handler, error)
        return handler


def _refusing(
    handler: grpc.RpcMethodHandler[Any, Any] | None, error: BatonError
) -> grpc.RpcMethodHandler[Any, Any]:
    """One of the same kind that ends the call with the error."""

    async def refuse(_: Any, context: Context) -> None:
        async with grpc_boundary(context):
            raise error

    async def refuse_stream(_: Any, context: Context) -> AsyncIterator[None]:
        async with grpc_boundary(context):
            raise error
        yield

    if handler is not None and handler.request_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse_stream)
    if handler is not None and handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse_stream)
    return grpc.unary_unary_rpc_method_handler(refuse)
