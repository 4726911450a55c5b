"""Conversions between errors and gRPC statuses, in one place for both directions."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
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


_BY_CODE = errors.classes_by_code()
_BY_STATUS: dict[grpc.StatusCode, type[errors.BatonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Forbidden,
    grpc.StatusCode.NOT_FOUND: errors.ModelNotFound,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: errors.WorkerFailed,
}


LACKING_RETRY_S = 1.0
"""Retry delay for a process that has run out of a resource, in seconds."""


@contextlib.asynccontextmanager
async def grpc_boundary(
    context: grpc.aio.ServicerContext[object, object],
) -> AsyncIterator[None]:
    """Run a servicer's method, and end the call with the status of any error that is raised."""
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        await _abort(context, as_baton_error(error))


def as_baton_error(failure: Exception) -> errors.BatonError:
    """Return the error that a caller gets for a failure. An unexpected failure is logged.

    A process without descriptors, memory or disk space cannot run this request now, but another
    process may: that is WorkerFailed.
    """
    if isinstance(failure, errors.BatonError):
        return failure
    log.error("unexpected error in a gRPC call", exc_info=failure)
    if isinstance(failure, OSError | MemoryError):
        lacking = (
            "the process has run out of a resource that the request needs: "
            f"{type(failure).__name__}"
        )
        return errors.WorkerFailed(lacking, retry_after=LACKING_RETRY_S)
    return errors.BatonError(f"internal error: {type(failure).__name__}")


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
    try:
        await context.abort(grpc.StatusCode[error.grpc_status], error.message, tuple(trailers))
    except grpc.aio.InternalError:
        # The connection is gone; the status may have waited for it. gRPC cancels such a call.
        raise asyncio.CancelledError from None


def error_from_code(
    code: str, message: str, *, retry_after: float | None = None
) -> errors.BatonError:
    """Return the error for a code of ``baton.errors``; an unknown code gives HandoffError.

    ``retry_after`` is in seconds.
    """
    return _BY_CODE.get(code, errors.HandoffError)(message, retry_after=retry_after)


def error_from_rpc(error: grpc.aio.AioRpcError, peer: str) -> errors.BatonError:
    """Return the error that a peer reported. ``peer`` names the peer in the message if the
    transport itself failed."""
    trailers = dict(error.trailing_metadata() or ())
    cls = _BY_CODE.get(str(trailers.get(CODE_KEY, "-")))
    message = error.details() or str(error.code())
    if cls is None:
        cls = _BY_STATUS.get(error.code(), errors.WorkerFailed)
        message = f"{peer}: {message}"
    retry = trailers.get(RETRY_KEY)
    return cls(message, retry_after=int(retry) / 1000 if retry is not None else None)


@contextlib.contextmanager
def call_errors(peer: str) -> Iterator[None]:
    """Wrap the awaiting of a call to the process ``peer``: raise the error that the peer reported.

    The error is WorkerFailed if the channel is closed during the call.
    """
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, peer) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # The caller did not cancel: gRPC cancels a call whose channel is closed, or to which it can
        # no longer write.
        raise errors.WorkerFailed(f"the connection to {peer} broke") from None


@contextlib.asynccontextmanager
async def stream_errors(
    call: grpc.aio.StreamStreamCall[RequestT, R], peer: str
) -> AsyncIterator[None]:
    """Wrap the writing and reading of a stream's messages: raise the error that ended the stream.
    ``peer`` names the other process."""
    with call_errors(peer):
        try:
            yield
        except asyncio.InvalidStateError as error:
            raise await stream_ending(call, peer) from error


async def stream_ending(
    call: grpc.aio.StreamStreamCall[RequestT, R], peer: str
) -> errors.BatonError:
    """Return the reason why a stream gave no message: its peer ended the stream, or sent a message
    that cannot be parsed."""
    if not call.done():
        return errors.HandoffError(f"{peer} sent a message that cannot be read")
    code = await call.code()
    if code is grpc.StatusCode.OK:
        return errors.WorkerFailed(f"{peer} ended the stream")
    status = grpc.aio.AioRpcError(
        code, grpc.aio.Metadata(), await call.trailing_metadata(), await call.details()
    )
    return error_from_rpc(status, peer)
