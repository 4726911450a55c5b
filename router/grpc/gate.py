"""The gate of the gRPC listener: every call passes it before its service does. It checks keys."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
import grpc.aio

from baton.errors import BatonError, NotFound
from baton.rpc.grpc_errors import grpc_boundary
from router.access.access import Access, scope_of_service
from router.access.audit import Refusals

Context = grpc.aio.ServicerContext[Any, Any]


class GrpcGate(grpc.aio.ServerInterceptor):
    """Refuses calls that their key does not allow; of methods that are not there, too."""

    def __init__(self, access: Access, *, operators: bool = True) -> None:
        """``operators``: whether operators' calls are served, which ``admin_http`` takes away."""
        self._access = access
        self._operators = operators
        self._refusals = Refusals(access)

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
            if needed == "admin" and not self._operators:
                raise NotFound("operators' calls are served over HTTP alone, at admin_http")
            self._access.check(given, needed)
        except BatonError as error:
            return self._refusing(error, handler_call_details.method, given)
        return handler

    def _refusing(
        self, error: BatonError, method: str, metadata: Mapping[str, str]
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """A handler that ends the call with the error."""

        async def refuse(_: Any, context: Context) -> None:
            self._refusals.add(error, metadata, action=method, client=context.peer())
            async with grpc_boundary(context):
                raise error

        # Of this kind whatever the method's own: nothing of the call's messages is read.
        return grpc.stream_stream_rpc_method_handler(refuse)
