"""The busiest paths, answered without FastAPI's routing and middleware.

FastAPI knows the same handlers, for its description of the API. Its own way to them costs a fifth
of what HTTP and JSON take for a request, and passes every event through wrappers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from baton.errors import BatonError
from router.http.edge import HttpEdge
from router.http.errors import error_response

Handler = Callable[[Request], Awaitable[Response]]


class DirectRoutes:
    """Passes on what is not a POST to one of its paths. A handler may raise BatonError."""

    def __init__(self, app: ASGIApp, posts: Mapping[str, Handler]) -> None:
        """``posts``: handlers by path."""
        self._app = app
        self._posts = posts
        self._direct = HttpEdge(self._answer)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        to = self._direct if is_post and scope["path"] in self._posts else self._app
        await to(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        handler = self._posts[scope["path"]]
        try:
            response = await handler(Request(scope, receive, send))
            await response(scope, receive, send)
        except BatonError as error:
            # A response that has begun raises none.
            await error_response(error)(scope, receive, send)
