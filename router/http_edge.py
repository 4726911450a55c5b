"""The outermost layer of the HTTP front: request ids, and no error without an answer."""

from __future__ import annotations

import logging
import re
import secrets

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.errors import BatonError
from router.disconnect import ClientGone
from router.http_errors import error_response

log = logging.getLogger(__name__)

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}", re.ASCII)


class HttpEdge:
    """Gives every response an ``x-request-id``, the client's own where it is sane."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id", ""))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", request_id.encode()),
                ]
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except (ClientGone, ClientDisconnect):
            return
        except Exception as error:
            log.exception("unexpected error in request %s", request_id)
            if started:
                raise
            internal = BatonError(f"internal error: {type(error).__name__}")
            await error_response(internal)(scope, receive, send_with_id)


def _request_id(given: str) -> str:
    return given if _SANE_ID.fullmatch(given) else secrets.token_hex(16)
