"""The installed uvicorn has what ``router`` uses of it; each failure names what is gone."""

from __future__ import annotations

import asyncio
import inspect
import re
from importlib.metadata import version

import pytest
import uvicorn

from router.http.protocol import BoundedHttpProtocol
from router.http.uvicorn_internals import HttpToolsProtocol, QuietServer
from tests.support.private_names import find, missing

USER = "router/http/uvicorn_internals.py"
_PROTOCOL = "uvicorn.protocols.http.httptools_impl.HttpToolsProtocol"
NAMES = (
    "uvicorn.Config(ssl_context_factory, http)",
    "uvicorn.Server.capture_signals",
    "uvicorn.Server.startup(sockets)",
    "uvicorn.Server.shutdown(sockets)",
    "uvicorn.protocols.http.flow_control.HIGH_WATER_LIMIT",
    f"{_PROTOCOL}.connection_made(transport)",
    f"{_PROTOCOL}.connection_lost(exc)",
    f"{_PROTOCOL}.data_received(data)",
    f"{_PROTOCOL}.eof_received",
    f"{_PROTOCOL}.pause_writing",
    f"{_PROTOCOL}.resume_writing",
    f"{_PROTOCOL}.on_message_begin",
    f"{_PROTOCOL}.on_headers_complete",
    f"{_PROTOCOL}.on_body(body)",
    f"{_PROTOCOL}.on_message_complete",
    f"{_PROTOCOL}.on_response_complete",
    f"{_PROTOCOL}.send_400_response(msg)",
    f"{_PROTOCOL}.shutdown",
)
ATTRIBUTES = (
    *("app", "cycle", "flow", "headers", "parser", "pipeline", "scheme"),
    *("timeout_keep_alive_task", "transport"),
)
CYCLE_ATTRIBUTES = (
    *("chunked_encoding", "disconnected", "expected_content_length", "keep_alive"),
    *("message_event", "more_body"),
    *("response_complete", "response_started"),
)


def test_uvicorn_has_all_names_in_use() -> None:
    assert missing(USER, NAMES) == []


async def test_a_connection_has_its_attributes() -> None:
    async def app(scope: object, receive: object, send: object) -> None: ...

    config = uvicorn.Config(app, lifespan="off", ws="none", log_config=None)
    server = uvicorn.Server(config)
    made = HttpToolsProtocol(config, server.server_state, {}, asyncio.get_running_loop())
    gone = [name for name in ATTRIBUTES if not hasattr(made, name)]
    assert gone == [], f"uvicorn {version('uvicorn')}: {_PROTOCOL} has none of these: see {USER}"
    cycle = find("uvicorn.protocols.http.httptools_impl.RequestResponseCycle")
    source = inspect.getsource(cycle.__init__)
    gone = [
        name for name in CYCLE_ATTRIBUTES if not re.search(rf"self\.{name}(: [^=]+)? = ", source)
    ]
    assert gone == [], f"see {USER}"


def test_what_is_overridden_is_listed() -> None:
    """A method of ours that uvicorn also has would be called by uvicorn."""
    overridden = {name for name in vars(BoundedHttpProtocol) if hasattr(HttpToolsProtocol, name)}
    listed = {name.partition("(")[0].rpartition(".")[2] for name in NAMES}
    own = {name for name in overridden if not (name.startswith("__") and name.endswith("__"))}
    assert own - {"__doc__"} <= listed


def test_the_server_handles_no_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[object] = []
    monkeypatch.setattr("signal.signal", lambda *given: called.append(given))
    with uvicorn.Server(uvicorn.Config("app:none")).capture_signals():
        assert called, "the test sees what uvicorn does"
    called.clear()
    with QuietServer(uvicorn.Config("app:none")).capture_signals():
        assert not called
