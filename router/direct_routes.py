"""The busiest paths, answered without FastAPI's routing.

FastAPI knows the same handlers, for its description of the API. Its own way to them costs a fifth
of what HTTP and JSON take for a request, and wraps every event that is sent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError
from router.http_errors import error_response

Handler = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """Passes on what is not a POST to one of its paths. A handler may raise BatonError."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, Handler]) -> None:
        """``posts``: handlers by path."""
        self._app = app
        self._posts = posts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = None
        if scope["type"] == "http" and scope["method"] == "POST":
            handler = self._posts.get(scope["path"])
        if handler is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await handler(Request(scope, receive, send))
            await response(scope, receive, send)
        except BatonError as error:
            # A response that has begun raises none.
            await error_response(error)(scope, receive, send)
