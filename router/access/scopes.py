"""What a key must allow for each path of the HTTP fronts and each service of the gRPC front.

One list for all of them: who adds an endpoint adds it here, and a test finds the one that is not.
Whatever is not listed takes an admin's key.
"""

from __future__ import annotations

from baton.config.choices import Scope

OPEN = frozenset({"/health", "/live"})
"""For whoever asks: they tell nothing but whether the process serves."""
_OPEN_PAGES = ("/console", "/console/")
_OPEN_FILES = "/console/static/"
"""Pages and their files, the same for everybody: what they show has paths of its own."""
_ADMIN = ("/console/what-if", "/v1/cache", "/v1/cluster", "/v1/pools", "/v1/workers")
_METRICS = ("/console", "/metrics")
_INFERENCE = (
    "/detokenize",
    "/docs",
    "/openapi.json",
    "/redoc",
    "/static-offline-docs",
    "/tokenize",
    "/v1/batches",
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/files",
    "/v1/messages",
    "/v1/model/info",
    "/v1/models",
    "/v1/responses",
)
_BY_PREFIX: dict[str, Scope] = {
    **dict.fromkeys(_ADMIN, "admin"),
    **dict.fromkeys(_METRICS, "metrics"),
    **dict.fromkeys(_INFERENCE, "inference"),
}
_OPEN_SERVICES = frozenset({"grpc.health.v1.Health"})
_INFERENCE_SERVICES = frozenset(
    {
        "baton.v1.InferenceService",
        "baton.v1.TokenService",
        "grpc.reflection.v1alpha.ServerReflection",
    }
)


def listed_scope(path: str) -> Scope | None:
    """The scope that is listed for a path of HTTP; None where it is open, or not listed."""
    end = len(path)
    while end > 0:
        scope = _BY_PREFIX.get(path[:end])
        if scope is not None:
            return scope
        end = path.rfind("/", 0, end)
    return None


def scope_of_path(path: str) -> Scope | None:
    """What a key must allow to ask for a path; None: it is open to all."""
    if path in OPEN or path in _OPEN_PAGES or path.startswith(_OPEN_FILES):
        return None
    return listed_scope(path) or "admin"


def scope_of_service(name: str) -> Scope | None:
    """The same of a gRPC service, by its full name."""
    if name in _OPEN_SERVICES:
        return None
    return "inference" if name in _INFERENCE_SERVICES else "admin"


def is_for_operators(path: str) -> bool:
    """Whether a path moves to the listener of ``admin_http``, where there is one."""
    return listed_scope(path) in ("admin", "metrics")
