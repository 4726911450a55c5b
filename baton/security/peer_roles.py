"""Authorization of callers of a worker's services, by the roles in their certificates.

A certificate of the cluster's CA opens the connection. The role among its names decides which
services it may call. A client of the API has a certificate of the same CA, and may call none of
them.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio

from baton.security.tls import PeerRole, roles_in

CALLERS: Mapping[str, frozenset[PeerRole]] = {
    "baton.v1.PrefillService": frozenset({"router"}),
    "baton.v1.DecodeService": frozenset({"router"}),
    "baton.v1.CacheService": frozenset({"router"}),
    "baton.v1.ControlService": frozenset({"router", "supervisor"}),
    "baton.v1.TransferService": frozenset({"worker"}),
    "baton.v1.BlockService": frozenset({"worker"}),
    "baton.v1.RankService": frozenset({"worker"}),
    "baton.v1.PodService": frozenset({"worker"}),
}
"""The roles that may call each service of a worker. No role may call other services."""
_HANDOFFS = "/baton.v1.DecodeService/Handoffs"

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


def callers_of(method: str) -> frozenset[PeerRole]:
    """Return the roles that may call ``/service/method``."""
    if method == _HANDOFFS:  # only prefill workers hand sequences off
        return frozenset({"worker"})
    return CALLERS.get(method.strip("/").partition("/")[0], frozenset())


def refusal(context: Any, method: str) -> str:
    """Return the reason why a TLS caller may not call ``method``; an empty text if it may."""
    shown = context.auth_context().get("x509_subject_alternative_name", ())
    roles = roles_in(name.decode(errors="replace") for name in shown)
    allowed = callers_of(method)
    if roles & allowed:
        return ""
    own = ", ".join(sorted(roles)) or "no role"
    return f"{method} is for {', '.join(sorted(allowed)) or 'no role'}; the certificate names {own}"


class PeerRoles(grpc.aio.ServerInterceptor):
    """Refuses a caller whose certificate names no role that may call a method."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Pass a call on if the caller's certificate names a role that may call its method; refuse
        it otherwise. See ``grpc.aio.ServerInterceptor``."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return _guarded(handler, handler_call_details.method)


def _guarded(handler: Any, method: str) -> Handler:
    kinds = {
        (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
        (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
        (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
        (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
    }
    name, make = kinds[handler.request_streaming, handler.response_streaming]
    behavior = _checked(getattr(handler, name), method)
    guarded: Handler = make(behavior, handler.request_deserializer, handler.response_serializer)
    return guarded


def _checked(behavior: Callable[[Any, Any], Any], method: str) -> Callable[[Any, Any], Any]:
    async def check(context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if why := refusal(context, method):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, why)

    if inspect.isasyncgenfunction(behavior):

        async def generate(request: Any, context: Any) -> AsyncIterator[Any]:
            await check(context)
            async with aclosing(behavior(request, context)) as answers:
                async for answer in answers:
                    yield answer

        return generate

    async def call(request: Any, context: Any) -> Any:
        await check(context)
        return await behavior(request, context)

    return call
