"""The outermost layer of the HTTP front: request ids, and no error without an answer."""

from __future__ import annotations

import logging
import secrets

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.client.headers import REQUEST_ID_HEADER, is_request_id
from baton.errors import BatonError
from router.http.disconnect import ClientGone
from router.http.errors import error_response

log = logging.getLogger(__name__)


class HttpEdge:
    """Gives every response an ``x-request-id``, the client's own where it is sane."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get(REQUEST_ID_HEADER, ""))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] = [
                    *message.get("headers", ()),
                    (REQUEST_ID_HEADER.encode(), request_id.encode()),
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
    return given if is_request_id(given) else secrets.token_hex(16)
