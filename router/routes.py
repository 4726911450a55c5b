"""Every HTTP path of a router process: its handler, and its OpenAPI description."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from prometheus_client.exposition import choose_encoder
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route

from baton.client.headers import ROUTER_HEADER
from baton.config.cluster import Config
from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.page import MetricsPage
from baton.version import VERSION
from router.admin.cluster_metrics import cluster_page
from router.admin.router_page import router_page
from router.core.request import Dispatcher
from router.embeddings.api import EmbeddingsApi
from router.embeddings.protocol import EmbeddingsRequest, EmbeddingsResponse
from router.http.errors import add_error_handlers
from router.http.gate import gated
from router.http.metrics_pages import MetricsPages
from router.http.openapi import ERRORS, describe, json_body, streamed
from router.inference.endpoint import Endpoint
from router.inference.service import InferenceService
from router.inference.tokens import TokenService
from router.listeners import Apps
from router.messages.api import MessagesApi
from router.messages.protocol import CountTokensRequest, MessagesRequest
from router.native.api import NativeApi
from router.native.protocol import (
    BatchGenerated,
    BatchGenerateRequest,
    Generated,
    GenerateRequest,
)
from router.openai.api import OpenAiApi
from router.openai.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    Model,
    ModelList,
)
from router.openai.tokenize_api import (
    Detokenized,
    DetokenizeRequest,
    ModelInfo,
    TokenizeApi,
    Tokenized,
    TokenizeRequest,
)
from router.responses.api import ResponsesApi
from router.responses.protocol import ResponsesRequest

_DESCRIPTION = """Large language models, served with disaggregated prefill and decode.

The APIs of OpenAI and Anthropic, and endpoints of Baton itself. A field that is marked as an
extension is not in OpenAI's API; other servers have many of them, too. An unsupported field, and a
typo of a known one, is rejected by name.
"""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, EMBEDDINGS = "/v1/responses", "/v1/messages", "/v1/embeddings"
GENERATE, GENERATE_BATCH = "/v1/generate", "/v1/generate/batch"
_DIRECT = (CHAT, COMPLETIONS, RESPONSES, MESSAGES, EMBEDDINGS, GENERATE, GENERATE_BATCH)
"""Paths whose handlers the gate calls directly, without FastAPI. The handlers take a Request and
return a Response."""


SupervisorPage = Callable[[], Awaitable[str | None]]
"""Function that returns host:port of the supervisor's metrics page, or None if the address is
unknown."""


class Mountable(Protocol):
    """Endpoints that another module creates and that can be added to the app."""

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""


@dataclass(frozen=True, slots=True)
class Apis:
    """The APIs for clients of one router process. Each is an adapter of one InferenceService."""

    service: InferenceService
    tokens: TokenService
    openai: OpenAiApi
    responses: ResponsesApi
    messages: MessagesApi
    embeddings: EmbeddingsApi
    native: NativeApi

    @classmethod
    def of(cls, service: InferenceService) -> Apis:
        """Create all APIs for clients, which share ``service``."""
        return cls(
            service,
            TokenService(service),
            OpenAiApi(service),
            ResponsesApi(service),
            MessagesApi(service),
            EmbeddingsApi(service),
            NativeApi(service),
        )

    def endpoints(self) -> dict[str, Endpoint]:
        """Return the endpoints that a batch request line may use, by path."""
        return {
            CHAT: self.openai.chat,
            COMPLETIONS: self.openai.completion,
            RESPONSES: self.responses.endpoint,
            EMBEDDINGS: self.embeddings.endpoint,
        }


def make_apps(
    apis: Apis,
    dispatcher: Dispatcher,
    metrics: RouterMetrics,
    cluster_id: str,
    *,
    number: int = 0,
    supervisor: SupervisorPage | None = None,
    more: Sequence[Mountable] = (),
) -> Apps:
    """Create the HTTP apps of one router process.

    ``cluster_id`` is a label of its metrics. ``number`` distinguishes the process from others that
    share its port. ``supervisor`` returns the address of the supervisor's metrics. ``more``:
    endpoints of batches and operators.
    """
    config, access = apis.service.config, apis.service.access
    # FastAPI's pages of /openapi.json would run scripts of others where a browser may have a key.
    app = FastAPI(
        title="Baton",
        version=VERSION,
        description=_DESCRIPTION,
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    add_error_handlers(app)
    _add_openai(app, apis.openai, apis.service.model.id)
    _add_apis(app, apis)
    page = partial(router_page, metrics, config, cluster_id, apis.service.model.id)
    _add_operations(app, dispatcher, metrics, page, number, supervisor, config)
    for one in more:
        one.mount(app)
    describe(app)
    endpoints = {route.path: route.endpoint for route in app.routes if isinstance(route, Route)}
    direct = {path: endpoints[path] for path in _DIRECT}
    if not config.admin_http:
        return Apps(gated(app, access, config, metrics, direct=direct), None, _paths(app))
    return Apps(
        gated(app, access, config, metrics, part="clients", direct=direct),
        gated(app, access, config, metrics, part="operators"),
        _paths(app),
    )


def _paths(app: FastAPI) -> tuple[tuple[str, str], ...]:
    return tuple(
        (method, route.path)
        for route in app.routes
        if isinstance(route, Route | Mount)
        for method in (sorted(route.methods or ()) if isinstance(route, Route) else ["GET"])
    )


def _add_openai(app: FastAPI, api: OpenAiApi, model_id: str) -> None:
    chat = {
        "model": model_id,
        "messages": [{"role": "user", "content": "Name the capital of France."}],
        "max_tokens": 32,
    }
    plain = {"model": model_id, "prompt": "The capital of France is", "max_tokens": 8}
    app.add_api_route(
        CHAT,
        api.chat_completions,
        methods=["POST"],
        tags=["openai"],
        response_model=None,
        responses={200: streamed(ChatCompletion), **ERRORS},
        openapi_extra=json_body(ChatCompletionRequest, chat),
    )
    app.add_api_route(
        COMPLETIONS,
        api.completions,
        methods=["POST"],
        tags=["openai"],
        response_model=None,
        responses={200: streamed(Completion), **ERRORS},
        openapi_extra=json_body(CompletionRequest, plain),
    )
    app.add_api_route("/v1/models", api.list_models, tags=["openai"], response_model=ModelList)
    app.add_api_route(
        "/v1/models/{model_id:path}",
        api.get_model,
        tags=["openai"],
        response_model=Model,
        responses={404: ERRORS[404]},
    )


def _add_apis(app: FastAPI, apis: Apis) -> None:
    tokens = TokenizeApi(apis.service, apis.tokens)
    described: list[tuple[str, Any, str, type[BaseModel], dict[str, Any]]] = [
        (RESPONSES, apis.responses.create, "openai", ResponsesRequest, streamed()),
        (
            EMBEDDINGS,
            apis.embeddings.create,
            "openai",
            EmbeddingsRequest,
            {"model": EmbeddingsResponse},
        ),
        (MESSAGES, apis.messages.create, "anthropic", MessagesRequest, streamed()),
        (
            "/v1/messages/count_tokens",
            apis.messages.count_tokens,
            "anthropic",
            CountTokensRequest,
            {},
        ),
        (GENERATE, apis.native.generate, "native", GenerateRequest, streamed(Generated)),
        (
            GENERATE_BATCH,
            apis.native.generate_batch,
            "native",
            BatchGenerateRequest,
            {"model": BatchGenerated},
        ),
        ("/tokenize", tokens.tokenize, "tokens", TokenizeRequest, {"model": Tokenized}),
        ("/detokenize", tokens.detokenize, "tokens", DetokenizeRequest, {"model": Detokenized}),
    ]
    for path, handler, tag, body, answer in described:
        # Anthropic's errors have another format.
        known = {} if tag == "anthropic" else ERRORS
        app.add_api_route(
            path,
            handler,
            methods=["POST"],
            tags=[tag],
            response_model=None,
            responses={200: answer, **known},
            openapi_extra=json_body(body),
        )
    app.add_api_route(
        "/v1/model/info", tokens.model_info, tags=["tokens"], response_model=ModelInfo
    )


def _add_operations(
    app: FastAPI,
    dispatcher: Dispatcher,
    metrics: RouterMetrics,
    page: Callable[[], MetricsPage],
    number: int,
    supervisor: SupervisorPage | None,
    config: Config,
) -> None:
    inside = MetricsPages(config.tls.of("router"))

    async def health() -> Response:
        """Whether requests can be served: 200 with `ok` or `degraded`, otherwise 503."""
        status, reason = dispatcher.health()
        content = {"status": status, **({"reason": reason} if reason else {})}
        headers = {ROUTER_HEADER: str(number)}
        return JSONResponse(content, 503 if status == "down" else 200, headers)

    async def live() -> dict[str, str]:
        """The process is up."""
        return {"status": "ok"}

    async def version() -> dict[str, str]:
        """The version of Baton."""
        return {"version": VERSION}

    async def load() -> dict[str, int]:
        """Active requests of all processes of this router."""
        return {"server_load": await asyncio.to_thread(lambda: _active(metrics.shown()))}

    async def own_metrics(request: Request) -> Response:
        """This router's metrics, summed over its processes, for Prometheus.

        In the OpenMetrics format, if the client accepts it, with traces as exemplars of TTFT.
        """
        draw, kind = choose_encoder(request.headers.get("accept", ""))
        return Response(await asyncio.to_thread(lambda: draw(page())), media_type=kind)

    async def all_metrics() -> Response:
        """All metrics of the cluster on one page, for people."""
        told = None if supervisor is None else await supervisor()
        every = await cluster_page(page(), dispatcher.metrics_addresses(), told, inside)
        return Response(every, media_type=CONTENT_TYPE_LATEST)

    async def targets() -> list[dict[str, Any]]:
        """Addresses of the metrics of workers and supervisor, for Prometheus service discovery."""
        told = None if supervisor is None else await supervisor()
        pages = {"worker": dispatcher.metrics_addresses(), "supervisor": [told] if told else []}
        scheme = {} if inside.scheme == "http" else {"__scheme__": inside.scheme}
        return [
            {"targets": found, "labels": {"part": part, **scheme}}
            for part, found in pages.items()
            if found
        ]

    for path, handler in (
        ("/health", health),
        ("/live", live),
        ("/version", version),
        ("/load", load),
        ("/metrics", own_metrics),
        ("/metrics/cluster", all_metrics),
        ("/metrics/targets", targets),
    ):
        app.add_api_route(path, handler, tags=["operations"], response_model=None)
    # As in vLLM: SageMaker uses GET, other clients POST.
    for method in ("GET", "POST"):
        app.add_api_route(
            "/ping", health, methods=[method], tags=["operations"], response_model=None
        )


def _active(shown: CollectorRegistry) -> int:
    found = (
        sample.value
        for family in shown.collect()
        for sample in family.samples
        if sample.name == "baton_active_requests"
    )
    return round(sum(found))
