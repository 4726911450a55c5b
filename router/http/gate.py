"""What every HTTP request passes before any endpoint sees it: bounds, browsers' tricks, its key.

A page that somebody has open may send requests to a server on the same machine, without asking, and
by a name of its own reach it as its own site (DNS rebinding). It cannot choose what its browser
says of it: the Host, Origin and Sec-Fetch-Site headers.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Container, Iterable
from typing import Any, Literal
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.errors import (
    BatonError,
    Forbidden,
    HeadTooLarge,
    InvalidRequest,
    NotFound,
    Unauthenticated,
)
from baton.telemetry.metrics import RouterMetrics
from router.access.access import OPEN, Access, is_for_operators, is_loopback, scope_of_path
from router.core.request_recorder import count_refusal
from router.http.edge import HttpEdge
from router.http.errors import anthropic_error, error_object, error_response

Part = Literal["all", "clients", "operators"]
"""Whose endpoints a listener has."""
MAX_HEADERS = 128
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_SAME_SITE = frozenset({"same-origin", "none"})
_PROMPT = 'Basic realm="Baton: any name, and an API key as the password", charset="UTF-8"'
_SHOWN_NAME = 100


class HttpGate:
    """Refuses, or passes on to the app. Its state does not change; ``access`` knows the keys."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        config: Config,
        metrics: RouterMetrics,
        *,
        part: Part = "all",
        counted: Container[str] = (),
    ) -> None:
        """``counted``: paths whose refusals count as requests."""
        self._app = app
        self._access = access
        self._metrics = metrics
        self._part = part
        self._counted = counted
        address = config.admin_http if part == "operators" else config.http
        self._loopback = is_loopback(split_host_port(address)[0])
        self._hosts = frozenset(name.lower() for name in config.allowed_hosts)
        self._origins = frozenset(config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] == "http":
            headers = _texts(scope["headers"])
            try:
                self._check(scope["method"], scope["path"], headers, len(scope["headers"]))
            except BatonError as error:
                if scope["path"] in self._counted and scope["method"] == "POST":
                    count_refusal(self._metrics, error)
                await HttpEdge(_refusal(error, scope["path"], headers))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, method: str, path: str, headers: dict[str, str], count: int) -> None:
        if count > MAX_HEADERS:
            raise HeadTooLarge(f"the request has more than {MAX_HEADERS} headers")
        if self._loopback or path not in OPEN:
            # Those who look whether it lives know an address alone, a pod's for instance.
            self._check_host(headers.get("host", ""))
        if method not in _READING:
            self._check_site(headers)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise InvalidRequest("a Content-Encoding is not supported: send the body as it is")
        elsewhere = is_for_operators(path) != (self._part == "operators")
        if self._part != "all" and path not in OPEN and elsewhere:
            raise NotFound("there is no such path on this listener")
        needed = scope_of_path(path)
        if needed is not None:
            self._access.check(headers, needed)

    def _check_host(self, given: str) -> None:
        name = _host_name(given)
        if not name or "*" in self._hosts or name in self._hosts:
            return
        if _is_local(name) if self._loopback else not self._hosts:
            return
        raise Forbidden(
            f"the Host {name[:_SHOWN_NAME]!r} is not served here: whoever runs this server can name"
            " it in allowed_hosts"
        )

    def _check_site(self, headers: dict[str, str]) -> None:
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
        if "*" in self._origins or origin in self._origins:
            return
        if site in _SAME_SITE or (not site and not origin):
            return
        if not site and _host_of(origin) == headers.get("host", "").lower():
            return
        raise Forbidden(
            "pages of other sites may not send this: whoever runs this server can name their origin"
            " in allowed_origins"
        )


def gated(
    app: ASGIApp,
    access: Access,
    config: Config,
    metrics: RouterMetrics,
    *,
    part: Part = "all",
    counted: Container[str] = (),
) -> ASGIApp:
    """The app behind its gate, and for pages of ``allowed_origins`` behind CORS."""
    gate = HttpGate(app, access, config, metrics, part=part, counted=counted)
    if not config.allowed_origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after", "retry-after-ms"],
    )


def _texts(headers: Iterable[tuple[bytes, bytes]]) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in headers}


def _host_name(given: str) -> str:
    """Without port, brackets and the dot that stands for the root."""
    given = given.strip().lower()
    if given.startswith("["):
        return given[1:].partition("]")[0]
    return given.partition(":")[0].rstrip(".")


def _host_of(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


def _is_local(name: str) -> bool:
    """No stranger can have a page under such a name: it is no name of the public DNS."""
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(error: BatonError, path: str, headers: dict[str, str]) -> ASGIApp:
    shape: Callable[[BatonError], dict[str, Any]] = error_object
    if path.startswith("/v1/messages"):
        shape = anthropic_error
    response = error_response(error, shape)
    if isinstance(error, Unauthenticated) and "text/html" in headers.get("accept", ""):
        # A browser asks its user, and shows the password to everything of this site.
        response.headers["www-authenticate"] = _PROMPT
    return response
