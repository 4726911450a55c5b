"""One small tree of errors.

Rooms raise these; only the listeners turn them into HTTP answers (``router.http.errors``) and gRPC
statuses (``baton.rpc.grpc_errors``). docs/reference/errors.md is made from this module: the first
paragraph of a class is the meaning, the second one says whether to retry and what to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from baton.request import LoadSnapshot


class BatonError(Exception):
    """Baton has failed for a reason that it does not expect.

    Retry once. If it fails again, look for the traceback in the log of the process. ``message`` is
    safe to show to a client: it holds no secret and no prompt.
    """

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
    """The configuration, files or machine of the operator do not fit.

    Do not retry. Change what the message names, and start again.
    """

    code = "config_error"


class InvalidRequest(BatonError):
    """A field of the request is missing, or has a value that is not allowed.

    Do not retry. Change the field that ``param`` and the message name.
    """

    http_status = 400
    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"
    code = "invalid_value"


class ContextLengthExceeded(InvalidRequest):
    """The prompt, or the prompt and max_tokens, do not fit the model's context.

    Do not retry. Shorten the prompt, lower ``max_tokens``, or set ``truncate_prompt_tokens``.
    """

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """The request sets a field that this server does not know or serve.

    Do not retry. Leave the field out, or correct its name.
    """

    code = "unsupported_parameter"


class InvalidGrammar(InvalidRequest):
    """A grammar or a JSON schema cannot be compiled.

    Do not retry. Correct what the message names: it is the reason alone.
    """

    code = "invalid_grammar"


class GrammarFailed(InvalidRequest):
    """A sequence could not follow its grammar any further: that takes too much work.

    Do not retry. Use a simpler grammar or schema.
    """

    code = "grammar_failed"


class PoisonRequest(InvalidRequest):
    """Several workers have failed while they ran the request, or recently one with its prompt.

    Do not retry before the time in ``Retry-After``, if the answer has one. Look in the logs of the
    workers for the reason of the failures.
    """

    code = "poison_request"


class Unauthenticated(BatonError):
    """The request has no known API key, and one is required.

    Do not retry. Send a valid key as ``Authorization: Bearer KEY``.
    """

    http_status = 401
    grpc_status = "UNAUTHENTICATED"
    error_type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(BatonError):
    """The caller is known, and may not do this.

    Do not retry. Use a key that has the scope in the message.
    """

    http_status = 403
    grpc_status = "PERMISSION_DENIED"
    error_type = "invalid_request_error"
    code = "forbidden"


class NotFound(BatonError):
    """What the request names does not exist, or belongs to another tenant.

    Do not retry. Check the id and the key.
    """

    http_status = 404
    grpc_status = "NOT_FOUND"
    error_type = "invalid_request_error"
    code = "not_found"


class ModelNotFound(BatonError):
    """The model that the request names is not served.

    Do not retry. Take a name from ``GET /v1/models``.
    """

    http_status = 404
    grpc_status = "NOT_FOUND"
    error_type = "invalid_request_error"
    code = "model_not_found"


class LastWorker(BatonError):
    """The last ready worker of a role would leave it.

    Do not retry until another worker of the role is ready, or set ``force``.
    """

    http_status = 409
    grpc_status = "FAILED_PRECONDITION"
    error_type = "invalid_request_error"
    code = "last_worker"


class PlacedElsewhere(BatonError):
    """Baton cannot change the size of a pool, because something else places the workers.

    Do not retry. Run the command that the message names.
    """

    http_status = 409
    grpc_status = "FAILED_PRECONDITION"
    error_type = "invalid_request_error"
    code = "placed_elsewhere"


class CacheShareExceeded(BatonError):
    """Pinned prefixes of the tenant take all of its share of the cache.

    Retry after a pin has ended, or delete one with ``DELETE /v1/cache/prefixes/{prefix_id}``.
    """

    http_status = 409
    grpc_status = "RESOURCE_EXHAUSTED"
    error_type = "invalid_request_error"
    code = "cache_share_exceeded"


class UnsupportedEncoding(BatonError):
    """The body is compressed: it has a ``Content-Encoding``.

    Do not retry. Send the body as it is.
    """

    http_status = 415
    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"
    code = "unsupported_encoding"


class RequestTooLarge(BatonError):
    """The body is over the size limit.

    Do not retry. Send a smaller body; the operator sets ``max_body_bytes`` and
    ``max_file_bytes``.
    """

    http_status = 413
    grpc_status = "INVALID_ARGUMENT"
    error_type = "invalid_request_error"
    code = "request_too_large"


class HeadTooLarge(RequestTooLarge):
    """The request's headers are too many or too long.

    Do not retry. Send fewer or shorter headers.
    """

    http_status = 431
    code = "head_too_large"


class Overloaded(BatonError):
    """The queues are full; the request was not started.

    Retry after the time in ``Retry-After``.
    """

    http_status = 429
    grpc_status = "RESOURCE_EXHAUSTED"
    error_type = "rate_limit_error"
    code = "overloaded"


class DeadlineUnreachable(Overloaded):
    """The request would be late, because other work comes first; it was not started.

    Retry after the time in ``Retry-After``, or with a later deadline.
    """

    code = "deadline_unreachable"


class RateLimitExceeded(Overloaded):
    """The API key has used up one of its limits.

    Retry after the time in ``Retry-After``. ``facts`` give what is left, as headers in HTTP and as
    trailers in gRPC.
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
    """The request could exceed the budget of its key or tenant. The code is OpenAI's.

    Do not retry before the next period of the budget, except with lower ``max_tokens``.
    """

    error_type = "insufficient_quota"
    code = "insufficient_quota"


class Unavailable(BatonError):
    """Nothing can serve the request at present.

    Retry after the time in ``Retry-After``.
    """

    http_status = 503
    grpc_status = "UNAVAILABLE"
    error_type = "server_error"
    code = "unavailable"


class WorkerFailed(Unavailable):
    """A worker died or failed while it held the request.

    Retry after the time in ``Retry-After``. The router has tried other workers where it could.
    """

    code = "worker_failed"


class StepFailed(WorkerFailed):
    """A step that had this request alone failed at a worker, and the worker goes on.

    Retry as for ``worker_failed``, which is what clients get. A router counts this error
    against the request.
    """

    code = "step_failed"


class NotConfigured(BatonError):
    """The operator has not configured what this endpoint needs.

    Do not retry. The message names the setting that the operator has to make.
    """

    http_status = 501
    grpc_status = "UNIMPLEMENTED"
    error_type = "server_error"
    code = "not_configured"


class StorageFull(BatonError):
    """The disk of the server's files and batches is full, read-only, or broken.

    Retry later: answers of the model need no storage and go on. The operator frees space in
    ``data_dir``.
    """

    http_status = 507
    grpc_status = "RESOURCE_EXHAUSTED"
    error_type = "server_error"
    code = "storage_full"


class DeadlineExceeded(BatonError):
    """The request's time was up before it ended.

    Retry with a later deadline, or ask for fewer tokens. The operator sets ``request_deadline_s``.
    """

    http_status = 504
    grpc_status = "DEADLINE_EXCEEDED"
    error_type = "server_error"
    code = "deadline_exceeded"


class HandoffError(Unavailable):
    """A handoff between two workers failed, also where the router tried again.

    Retry after the time in ``Retry-After``.
    """

    grpc_status = "ABORTED"
    code = "handoff_failed"


class ChecksumMismatch(HandoffError):
    """The receiver got other bytes of KV than the sender sent.

    Retry after the time in ``Retry-After``. If it lasts, check memory and network of the machines.
    """

    grpc_status = "DATA_LOSS"
    code = "handoff_checksum_mismatch"


class TicketEnded(HandoffError):
    """The ticket of a handoff is unknown, was released, or belongs to another writer.

    Retry after the time in ``Retry-After``.
    """

    code = "handoff_ticket_ended"


class FingerprintMismatch(HandoffError):
    """The two workers of a handoff do not serve the same weights.

    Do not retry. Start all workers with the same model and revision.
    """

    grpc_status = "FAILED_PRECONDITION"
    code = "handoff_fingerprint_mismatch"


class GeometryMismatch(HandoffError):
    """The KV caches of the two workers of a handoff cannot be converted into one another.

    Do not retry. Give the pools block sizes and KV types that fit.
    """

    grpc_status = "FAILED_PRECONDITION"
    code = "handoff_geometry_mismatch"


class FingerprintGone(WorkerFailed):
    """The last worker of the model version that began the answer has left.

    Retry after the time in ``Retry-After``: the version that is served now answers from the start.
    """

    code = "fingerprint_gone"


class NoRoom(Overloaded):
    """A decode worker has too few free blocks, or no place in its batch. Routers then search for
    another worker, or let the request wait. Clients do not get this error.

    Retry after the time in ``Retry-After``.
    """

    code = "no_decode_room"
    load: LoadSnapshot | None = None
    """Load of the worker that has no room; None if it is not known."""


def classes_by_code() -> dict[str | None, type[BatonError]]:
    """Every class of the tree, by its code."""

    def walk(root: type[BatonError]) -> list[type[BatonError]]:
        return [root, *(leaf for child in root.__subclasses__() for leaf in walk(child))]

    return {cls.code: cls for cls in walk(BatonError)}
