"""What the router uses of uvicorn beyond its documented API; no other module may.

uvicorn may change these names in any release, so pyproject.toml admits only the minor versions of
uvicorn that pass tests/unit/router/http/test_uvicorn_internals.py, which lists every one of them.
After
an upgrade that test names what is gone. ``BoundedHttpProtocol`` (``http_protocol.py``) derives from
``HttpToolsProtocol``, extends its callbacks and reads its attributes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

__all__ = ["HIGH_WATER_LIMIT", "HttpToolsProtocol", "QuietServer"]


class QuietServer(uvicorn.Server):
    """Handles no signals: the process of the router does, and stops everything in order."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
