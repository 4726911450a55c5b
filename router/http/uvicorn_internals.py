"""The undocumented parts of uvicorn that the router uses; no other module may import them.

uvicorn may change these names in any release. So pyproject.toml allows only minor versions that
pass tests/unit/router/http/test_uvicorn_internals.py. That test lists all of the names, and reports
those that an upgrade removed. ``BoundedHttpProtocol`` (``router/http/protocol.py``) derives from
``HttpToolsProtocol``, extends its callbacks and reads its attributes. ``HttpServer``
(``router/http/server.py``) accepts connections in place of uvicorn's listener.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

__all__ = [
    "HIGH_WATER_LIMIT",
    "HttpToolsProtocol",
    "QuietServer",
    "RequestResponseCycle",
    "ServerState",
]


class QuietServer(uvicorn.Server):
    """A uvicorn server without signal handlers: the router's process handles signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
