"""Errors as gRPC statuses, and back: the one boundary where the two worlds meet."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import grpc
import grpc.aio

from baton import errors

CODE_KEY = "baton-code"
RETRY_KEY = "baton-retry-after-ms"

log = logging.getLogger(__name__)

ServicerT = TypeVar("ServicerT")
RequestT = TypeVar("RequestT")
R = TypeVar("R")


def _subclasses(root: type[errors.BatonError]) -> list[type[errors.BatonError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _subclasses(child))]


_BY_CODE = {cls.code: cls for cls in _subclasses(errors.BatonError)}
_BY_STATUS: dict[grpc.StatusCode, type[errors.BatonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.NOT_FOUND: errors.ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.WorkerFailed,
}


@contextlib.asynccontextmanager
async def grpc_boundary(
    context: grpc.aio.ServicerContext[object, object],
) -> AsyncIterator[None]:
    """Inside a servicer's method: end the call with the status of whatever error is raised."""
    try:
        yield
    except errors.BatonError as error:
        await _abort(context, error)
    except (asyncio.CancelledError, grpc.aio.AbortError):
        raise
    except Exception as error:
        log.exception("unexpected error in a gRPC call")
        await _abort(context, errors.BatonError(f"internal error: {type(error).__name__}"))


def guarded(
    method: Callable[[ServicerT, RequestT, grpc.aio.ServicerContext[object, object]], Awaitable[R]],
) -> Callable[[ServicerT, RequestT, grpc.aio.ServicerContext[object, object]], Awaitable[R]]:
    """Decorates a servicer's unary method with ``grpc_boundary``."""

    @functools.wraps(method)
    async def inside(
        self: ServicerT, request: RequestT, context: grpc.aio.ServicerContext[object, object]
    ) -> R:
        async with grpc_boundary(context):
            return await method(self, request, context)
        raise AssertionError("the boundary has ended the call")

    return inside


async def _abort(
    context: grpc.aio.ServicerContext[object, object], error: errors.BatonError
) -> None:
    trailers = [(CODE_KEY, error.code or "")]
    if error.retry_after is not None:
        trailers.append((RETRY_KEY, str(int(error.retry_after * 1000))))
    if isinstance(error, errors.RateLimitExceeded):
        trailers.extend(error.facts.items())
    await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(trailers))


def error_from_code(
    code: str, message: str, *, retry_after: float | None = None
) -> errors.BatonError:
    """The error of that code; one that is not known here is a failed handoff."""
    return _BY_CODE.get(code, errors.HandoffError)(message, retry_after=retry_after)


def error_from_rpc(error: grpc.aio.AioRpcError, peer: str) -> errors.BatonError:
    """The error that a peer meant; ``peer`` names it where the transport itself failed."""
    trailers = dict(error.trailing_metadata() or ())
    cls = _BY_CODE.get(str(trailers.get(CODE_KEY, "-")))
    message = error.details() or str(error.code())
    if cls is None:
        cls = _BY_STATUS.get(error.code(), errors.WorkerFailed)
        message = f"{peer}: {message}"
    retry = trailers.get(RETRY_KEY)
    return cls(message, retry_after=int(retry) / 1000 if retry is not None else None)
