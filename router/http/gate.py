"""The gate of an HTTP listener: every request passes it once on its way to a handler.

The gate gives the request an id, checks its head, its browser's headers and its key, and runs the
handler. It calls the handlers of busy paths directly: FastAPI's own routing costs a fifth of the
time that HTTP and JSON take for a request, and wraps every event. FastAPI serves all others.

A page open in a browser may send requests to a server on the same machine without permission, and
may reach it under a name of its own (DNS rebinding). The page cannot set the Host, Origin and
Sec-Fetch-Site headers, which its browser sends.
"""

from __future__ import annotations

import ipaddress
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Literal
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.client.headers import REQUEST_ID_HEADER, is_request_id
from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.errors import (
    BatonError,
    Forbidden,
    HeadTooLarge,
    InvalidRequest,
    NotFound,
    Unauthenticated,
    UnsupportedEncoding,
)
from baton.telemetry.logs import of_request
from baton.telemetry.metrics import RouterMetrics
from router.access.access import (
    OPEN,
    Access,
    is_for_operators,
    is_loopback,
    listed_scope,
    scope_of_path,
)
from router.access.api_keys import Caller, check_one_credential
from router.access.audit import Refusals
from router.core.accounting import count_refusal
from router.http.client import ClientGone
from router.http.errors import error_response, internal_error
from router.http.fields import IGNORED_HEADER, collect_ignored, header_value
from router.http.protocol import MAX_HEADERS

log = logging.getLogger(__name__)

Handler = Callable[[Request], Awaitable[Response]]
"""Function that answers a request, or raises BatonError."""
Part = Literal["all", "clients", "operators"]
"""The group of endpoints that one HTTP listener serves."""
_READING = frozenset({"GET", "HEAD", "OPTIONS"})
_SAME_SITE = frozenset({"same-origin", "none"})
_PROMPT = 'Basic realm="Baton: any name, and an API key as the password", charset="UTF-8"'
_SHOWN_NAME = 100
_CREDENTIALS = frozenset({b"authorization", b"x-api-key"})
_ID_NAME = REQUEST_ID_HEADER.encode()
_IGNORED_NAME = IGNORED_HEADER.encode()
_HOST = re.compile(r"(?:\[[0-9A-Za-z:.%]+\]|[0-9A-Za-z._~-]*)(?::[0-9]*)?")
_NO_HANDLERS: Mapping[str, Handler] = MappingProxyType({})


class HttpGate:
    """The ASGI app that checks every request before ``app`` gets it. It holds no state of requests;
    ``access`` knows the API keys."""

    def __init__(
        self,
        app: ASGIApp,
        access: Access,
        config: Config,
        metrics: RouterMetrics,
        *,
        part: Part = "all",
        direct: Mapping[str, Handler] = _NO_HANDLERS,
    ) -> None:
        """Create a gate. ``direct``: POST handlers by path, which the gate calls without FastAPI.
        Requests to these paths that the gate refuses are counted."""
        self._app = app
        self._access = access
        self._refusals = Refusals(access)
        self._metrics = metrics
        self._part = part
        self._direct = direct
        address = config.admin_http if part == "operators" else config.http
        self._loopback = is_loopback(split_host_port(address)[0])
        self._hosts = frozenset(name.lower() for name in config.allowed_hosts)
        self._origins = frozenset(config.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request and answer it. If an error occurs after the response began, raise it,
        which ends the connection."""
        method, path, headers = scope["method"], scope["path"], Headers(scope=scope)
        handler = self._direct.get(path) if method == "POST" else None
        given = headers.get(REQUEST_ID_HEADER, "")
        request_id = given if is_request_id(given) else secrets.token_hex(16)
        scope.setdefault("state", {})["request_id"] = request_id
        answer = _Answer(send, request_id, is_head=method == "HEAD")
        caller: Caller | None = None
        try:
            caller = self._check(method, path, headers, scope["http_version"])
            if caller is not None and method == "POST" and listed_scope(path) == "inference":
                caller = await self._access.arrive(caller)
        except BatonError as error:
            if handler is not None:
                self._count(error, caller)
            self._note(error, scope, request_id)
            await _refusal(error, path, headers)(scope, receive, answer)
            return
        scope["state"]["caller"] = caller
        try:
            with of_request(request_id=request_id):
                if handler is None:
                    # HEAD is answered like GET, without the body (RFC 9110, section 9.3.2).
                    asked = "GET" if method == "HEAD" else method
                    await self._app({**scope, "method": asked}, receive, answer)
                    return
                response = await handler(Request(scope, receive, answer))
                await response(scope, receive, answer)
        except (ClientGone, ClientDisconnect):
            return
        except BatonError as error:
            # Responses raise no BatonError once they have begun.
            await error_response(error, path)(scope, receive, answer)
        except Exception as error:
            log.exception(
                "unexpected error in request %s", request_id, extra={"request_id": request_id}
            )
            if not answer.has_started:
                await error_response(internal_error(error), path)(scope, receive, answer)
            elif not answer.has_ended:
                raise
        finally:
            if caller is not None:
                self._access.leave(caller)

    def _count(self, error: BatonError, caller: Caller | None) -> None:
        count_refusal(self._metrics, error, None if caller is None else caller.principal)

    def _note(self, error: BatonError, scope: Scope, request_id: str) -> None:
        self._refusals.add(
            error,
            Headers(scope=scope),
            action=f"{scope['method']} {scope['path']}",
            client=(scope.get("client") or ("",))[0],
            request_id=request_id,
        )

    def _check(self, method: str, path: str, headers: Headers, version: str) -> Caller | None:
        """Check a request's path, browser headers and API key. Return the caller, or None if the
        path needs no key. Raises BatonError."""
        if len(headers.raw) > MAX_HEADERS:
            raise HeadTooLarge(f"the request has more than {MAX_HEADERS} headers")
        hosts = headers.getlist("host")
        if len(hosts) > 1 or (version == "1.1" and not hosts):
            raise InvalidRequest(f"the request has {len(hosts)} Host headers: send one")
        if hosts and not _HOST.fullmatch(hosts[0]):
            raise InvalidRequest(
                "the Host header is not a name or an address, with or without port"
            )
        if self._loopback or path not in OPEN:
            # On other interfaces, a liveness probe may use an address, such as a pod's, instead of
            # a name.
            self._check_host(headers.get("host", ""))
        if method not in _READING:
            self._check_site(headers)
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise UnsupportedEncoding("a Content-Encoding is not supported: send the body as it is")
        elsewhere = is_for_operators(path) != (self._part == "operators")
        if self._part != "all" and path not in OPEN and elsewhere:
            raise NotFound("there is no such path on this listener")
        needed = scope_of_path(path)
        if needed is None:
            return None
        check_one_credential(
            (name.decode(), value.decode("latin-1"))
            for name, value in headers.raw
            if name in _CREDENTIALS
        )
        return self._access.check(headers, needed)

    def _check_host(self, given: str) -> None:
        name = _host_name(given)
        if not name or "*" in self._hosts or name in self._hosts:
            return
        if _is_local(name) if self._loopback else not self._hosts:
            return
        raise Forbidden(
            f"the Host {name[:_SHOWN_NAME]!r} is not served here: the operator of this server can"
            " add it to allowed_hosts"
        )

    def _check_site(self, headers: Headers) -> None:
        origin, site = headers.get("origin", ""), headers.get("sec-fetch-site", "")
        if "*" in self._origins or origin in self._origins:
            return
        if site in _SAME_SITE or (not site and not origin):
            return
        if not site and _host_of(origin) == headers.get("host", "").lower():
            return
        raise Forbidden(
            "pages of other sites may not send this: the operator of this server can add their"
            " origin to allowed_origins"
        )


class _Answer:
    """Sends a response, with the headers that every one has. One to HEAD ends with its head, which
    also ends the work for it."""

    def __init__(self, send: Send, request_id: str, *, is_head: bool) -> None:
        self._send = send
        self._request_id = request_id
        self._is_head = is_head
        self._ignored = collect_ignored()
        self.has_started = self.has_ended = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_started = True
            more = [(_ID_NAME, self._request_id.encode())]
            if self._ignored:
                more.append((_IGNORED_NAME, header_value(self._ignored).encode()))
            message["headers"] = [*message.get("headers", ()), *more]
        elif self._is_head:
            if self.has_ended:
                return
            self.has_ended = True
            message = {"type": message["type"], "body": b"", "more_body": False}
        elif not message.get("more_body", False):
            self.has_ended = True
        await self._send(message)


def gated(
    app: ASGIApp,
    access: Access,
    config: Config,
    metrics: RouterMetrics,
    *,
    part: Part = "all",
    direct: Mapping[str, Handler] = _NO_HANDLERS,
) -> ASGIApp:
    """Wrap ``app`` in a gate. If ``allowed_origins`` is configured, also wrap it in CORS handling
    for pages from there."""
    gate = HttpGate(app, access, config, metrics, part=part, direct=direct)
    if not config.allowed_origins:
        return gate
    return CORSMiddleware(
        gate,
        allow_origins=config.allowed_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER, "retry-after", "retry-after-ms"],
    )


def _host_name(given: str) -> str:
    """Return the host name in a Host header or origin, without the port, brackets, and the dot of
    the root zone.
    """
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
    """Return whether a host name is local. It then cannot be a public DNS name, at which a stranger
    could have a page."""
    if "." not in name or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refusal(error: BatonError, path: str, headers: Headers) -> Response:
    response = error_response(error, path)
    if isinstance(error, Unauthenticated) and "text/html" in headers.get("accept", ""):
        # A browser prompts its user, and sends the password with all requests to this site.
        response.headers["www-authenticate"] = _PROMPT
    return response
