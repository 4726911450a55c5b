"""One small tree of errors.

Rooms raise these; only the fronts turn them into HTTP answers (``router.http.errors``) and gRPC
statuses (``baton.rpc.grpc_errors``). Each class says once what it means in both worlds.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class BatonError(Exception):
    """The root. ``message`` is safe to show to a client: it holds no secret and no prompt."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    """The name of a ``grpc.StatusCode``: a name, so that pure cores need no gRPC."""
    error_type: ClassVar[str] = "server_error"
    code: ClassVar[str | None] = "internal_error"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        """``param`` names the request's field at fault; ``retry_after`` is in seconds."""
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after


class ConfigError(BatonError):
    """The operator's configuration, files or machine do not fit; the message says what to do."""

    code = "config_error"


class InvalidRequest(BatonError):
    """What the client sent cannot be served as it is."""

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and max_tokens, do not fit the model's context."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A known field that this server does not serve was set."""

    code = "unsupported_parameter"


class InvalidGrammar(InvalidRequest):
    """A grammar, or a schema, that cannot be compiled; the message is the reason alone."""

    code = "invalid_grammar"


class GrammarFailed(InvalidRequest):
    """A sequence could not follow its grammar any further: the grammar takes too much to follow."""

    code = "grammar_failed"


class PoisonRequest(InvalidRequest):
    """Several workers have failed while they ran the request, or lately one with its prompt."""

    code = "poison_request"


class Unauthenticated(BatonError):
    """The request shows no API key that is known, and one is required."""

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    error_type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(BatonError):
    """The API key is known, and does not allow this."""

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    error_type = "invalid_request_error"
    code = "forbidden"


class NotFound(BatonError):
    """There is no such thing, or it belongs to somebody else."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    error_type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(BatonError):
    """No such model is served."""

    http_status = 404
    grpc_status = "NOT_FOUND"
    error_type = "invalid_request_error"
    code = "model_not_found"


class LastWorker(BatonError):
    """The last ready worker of a role would leave it, and the operator has not forced that."""

    http_status = 409
    grpc_status = "FAILED_PRECONDITION"
    error_type = "invalid_request_error"
    code = "last_worker"


class CacheShareExceeded(BatonError):
    """Pinned prefixes of the tenant take all of its share of the cache."""

    http_status = 409
    grpc_status = "RESOURCE_EXHAUSTED"
    error_type = "invalid_request_error"
    code = "cache_share_exceeded"


class RequestTooLarge(BatonError):
    """The body is over the size limit."""

    http_status = 413
    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"
    code = "request_too_large"


class HeadTooLarge(RequestTooLarge):
    """The request's headers are too many or too long."""

    http_status = 431
    code = "head_too_large"


class Overloaded(BatonError):
    """Queues are full; the request was not started and may be tried again."""

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    error_type = "rate_limit_error"
    code = "overloaded"


class DeadlineUnreachable(Overloaded):
    """So much work lies ahead that the request would be late; it was not started."""

    code = "deadline_unreachable"


class RateLimitExceeded(Overloaded):
    """The API key has used up one of its limits. ``facts`` say what is left: headers for HTTP,

    trailers for gRPC.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        retry_after: float | None = None,
        facts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        super().__init__(message, param=param, retry_after=retry_after)
        self.facts = facts


class BudgetExceeded(RateLimitExceeded):
    """The request could exceed the budget of its key or tenant. OpenAI's name for the code."""

    error_type = "insufficient_quota"
    code = "insufficient_quota"


class Unavailable(BatonError):
    """Nothing can serve the request at present."""

    http_status = 503
    grpc_status = "UNAVAILABLE"
    error_type = "server_error"
    code = "unavailable"


class WorkerFailed(Unavailable):
    """A worker died or failed while it held the request."""

    code = "worker_failed"


class StepFailed(WorkerFailed):
    """A step that had the request failed at a worker, and the worker goes on.

    Clients get WorkerFailed; a router counts this error as evidence against the request.
    """

    code = "step_failed"


class DeadlineExceeded(BatonError):
    """The request's time was up before it ended."""

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    error_type = "server_error"
    code = "deadline_exceeded"


class HandoffError(Unavailable):
    """Moving a sequence between workers failed."""

    grpc_status = "ABORTED"
    code = "handoff_failed"


class ChecksumMismatch(HandoffError):
    """Bytes that arrived are not the bytes that were sent."""

    grpc_status = "DATA_LOSS"
    code = "handoff_checksum_mismatch"


class TicketEnded(HandoffError):
    """The ticket is unknown here, was released, or belongs to another writer."""

    code = "handoff_ticket_ended"


class FingerprintMismatch(HandoffError):
    """The two workers do not serve the same weights."""

    grpc_status = "FAILED_PRECONDITION"
    code = "handoff_fingerprint_mismatch"


class GeometryMismatch(HandoffError):
    """The two workers' KV caches cannot be converted into one another."""

    grpc_status = "FAILED_PRECONDITION"
    code = "handoff_geometry_mismatch"


class NoRoom(Overloaded):
    """A decode worker has too few free blocks; ``retry_after`` estimates the wait."""

    code = "no_decode_room"


def classes_by_code() -> dict[str | None, type[BatonError]]:
    """Every class of the tree, by its code."""

    def walk(root: type[BatonError]) -> list[type[BatonError]]:
        return [root, *(leaf for child in root.__subclasses__() for leaf in walk(child))]

    return {cls.code: cls for cls in walk(BatonError)}
