"""The HTTP front: a FastAPI app that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from baton.config.cluster import Config
from baton.security.tls import LiveContext, client_context
from baton.telemetry.metrics import RouterMetrics
from baton.version import baton_version
from router.access.access import Access
from router.admin.cluster_metrics import cluster_page
from router.core.request import Dispatcher
from router.core.request_recorder import RequestStats
from router.core.served_model import ServedModel
from router.http.errors import add_error_handlers
from router.http.gate import gated
from router.http.openapi import ERRORS, describe, json_body, streamed
from router.inference.exchange import Exchange
from router.more_routes import add_more_routes
from router.openai.api import OpenAiApi
from router.openai.protocol import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    Model,
    ModelList,
)
from router.process_number import ROUTER_HEADER
from router.text.tokenizer import Tokenizer

_DESCRIPTION = """Large language models, served with prefill and decode apart.

The OpenAI API as far as it goes; fields marked as extensions are common to other servers.
Unknown fields are ignored; known ones that are not served are refused by name.
"""
_CHAT, _PLAIN = "/v1/chat/completions", "/v1/completions"


SupervisorPage = Callable[[], Awaitable[str | None]]
"""host:port, None where there is none."""


class Mountable(Protocol):
    """Endpoints that are made elsewhere."""

    def mount(self, app: FastAPI) -> None:
        """Add them to the app."""


def create_app(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
    access: Access | None = None,
    *,
    number: int = 0,
    supervisor: SupervisorPage | None = None,
    more: Sequence[Mountable] = (),
) -> ASGIApp:
    """The app of one router process with all endpoints, behind one gate; see ``create_apps``."""
    parts = create_apps(
        dispatcher,
        tokenizer,
        model,
        stats,
        config.model_copy(update={"admin_http": ""}),
        access,
        number=number,
        supervisor=supervisor,
        more=more,
    )
    return parts.http


@dataclass(frozen=True, slots=True)
class Apps:
    """What each listener serves."""

    http: ASGIApp
    admin: ASGIApp | None
    """At ``admin_http``; None where there is none."""
    paths: tuple[tuple[str, str], ...]
    """Methods and paths of all endpoints."""


def create_apps(
    dispatcher: Dispatcher,
    tokenizer: Tokenizer,
    model: ServedModel,
    stats: RequestStats,
    config: Config,
    access: Access | None = None,
    *,
    number: int = 0,
    supervisor: SupervisorPage | None = None,
    more: Sequence[Mountable] = (),
) -> Apps:
    """The apps of one router process; their life is that of what they are given.

    Without ``access``, keys are those of ``config``, and their limits are not kept. ``number``
    tells the process from the others that share its port. ``supervisor`` tells where the
    supervisor's metrics are. ``more`` endpoints are added: those of
    batches, and the operators'.
    """
    metrics = stats.metrics
    access = access or Access(config, metrics)
    api = OpenAiApi(dispatcher, tokenizer, model, stats, config, access)
    exchange = Exchange(dispatcher, tokenizer, model, stats, config, access)
    # FastAPI's own pages at /docs load their scripts from the Internet; these carry them.
    app = FastAPIOffline(
        title="Baton", version=baton_version(), description=_DESCRIPTION, redirect_slashes=False
    )
    add_error_handlers(app)
    _add_openai(app, api, model.id)
    _add_operations(app, dispatcher, metrics, number, supervisor, config)
    direct = add_more_routes(app, exchange, tokenizer, model)
    for endpoints in more:
        endpoints.mount(app)
    describe(app)
    direct |= {_CHAT: api.chat_completions, _PLAIN: api.completions}
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
        _CHAT,
        api.chat_completions,
        methods=["POST"],
        tags=["openai"],
        response_model=None,
        responses={200: streamed(ChatCompletion), **ERRORS},
        openapi_extra=json_body(ChatCompletionRequest, chat),
    )
    app.add_api_route(
        _PLAIN,
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


def _add_operations(
    app: FastAPI,
    dispatcher: Dispatcher,
    metrics: RouterMetrics,
    number: int,
    supervisor: SupervisorPage | None,
    config: Config,
) -> None:
    own = config.tls.of("router")
    inside = None if own is None else LiveContext(client_context(own), own)

    async def health() -> Response:
        """Whether requests can be served: 200 with `ok` or `degraded`, otherwise 503."""
        status, reason = dispatcher.health()
        content = {"status": status, **({"reason": reason} if reason else {})}
        headers = {ROUTER_HEADER: str(number)}
        return JSONResponse(content, 503 if status == "down" else 200, headers)

    async def live() -> dict[str, str]:
        """The process is up."""
        return {"status": "ok"}

    async def own_metrics(request: Request) -> Response:
        """This router's series, summed over its processes, for Prometheus.

        As OpenMetrics where that is asked for: then with exemplars, traces of TTFT's buckets.
        """
        draw, kind = choose_encoder(request.headers.get("accept", ""))
        page = await asyncio.to_thread(lambda: draw(metrics.shown()))
        return Response(page, media_type=kind)

    async def all_metrics() -> Response:
        """Everything of the cluster in one page, for people."""
        told = None if supervisor is None else await supervisor()
        page = await cluster_page(metrics.shown(), dispatcher.metrics_addresses(), told, inside)
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    async def targets() -> list[dict[str, Any]]:
        """Where the pages of workers and supervisor are, for Prometheus' HTTP service discovery."""
        told = None if supervisor is None else await supervisor()
        pages = {"worker": dispatcher.metrics_addresses(), "supervisor": [told] if told else []}
        scheme = {} if inside is None else {"__scheme__": "https"}
        return [
            {"targets": found, "labels": {"part": part, **scheme}}
            for part, found in pages.items()
            if found
        ]

    for path, handler in (
        ("/health", health),
        ("/live", live),
        ("/metrics", own_metrics),
        ("/metrics/cluster", all_metrics),
        ("/metrics/targets", targets),
    ):
        app.add_api_route(path, handler, tags=["operations"], response_model=None)
