"""What counts as a broken connection, and who may ask again after one."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from baton.rpc.grpc_channel import make_server
from baton.rpc.grpc_errors import CODE_KEY
from baton.v1 import inference_pb2
from tests.chaos.load.call import NOT_CLEAR, RESET, UNCLEAR, Call, Fronts
from tests.chaos.load.questions import questions
from tests.support.e2e.cluster import UpProcess
from tests.support.e2e.rolling_restart import Load

QUESTION = questions(0)[0]


SERVICE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name


@asynccontextmanager
async def failing(status: grpc.StatusCode, *trailers: tuple[str, str]) -> AsyncIterator[Fronts]:
    """A server on which every call fails with this status."""

    async def fail(_: bytes, context: Any) -> AsyncIterator[bytes]:
        await context.abort(status, "planted", trailers)
        yield b""

    server = make_server()
    methods: dict[str, Any] = {"Generate": grpc.unary_stream_rpc_method_handler(fail)}
    server.add_registered_method_handlers(SERVICE, methods)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Fronts("", f"127.0.0.1:{port}", "tiny")
    finally:
        await server.stop(0)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (grpc.StatusCode.UNAVAILABLE, RESET),
        (grpc.StatusCode.INTERNAL, UNCLEAR),
        (grpc.StatusCode.UNKNOWN, UNCLEAR),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, UNCLEAR),
    ],
)
async def test_a_grpc_error_without_a_code_is_a_reset_only_where_it_may_be_one(
    status: grpc.StatusCode, error: str
) -> None:
    async with failing(status) as fronts:
        call = Call.of(QUESTION, "grpc")
        await call.run(fronts)
    assert call.error == error
    assert call.error in NOT_CLEAR
    assert status.name in call.error_text


async def test_a_grpc_error_with_a_code_is_no_reset() -> None:
    async with failing(grpc.StatusCode.UNAVAILABLE, (CODE_KEY, "unavailable")) as fronts:
        call = Call.of(QUESTION, "grpc")
        await call.run(fronts)
    assert call.error == "unavailable"


class Cutting(BaseHTTPRequestHandler):
    """Cuts the first answer short; the later ones are whole."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "text": "x", "finish_reason": "length"}
        body = f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body) + (type(self).asked == 1)))
        self.end_headers()
        self.wfile.write(body)
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def cutting() -> Iterator[tuple[str, type[Cutting]]]:
    class Own(Cutting):
        pass

    server = HTTPServer(("127.0.0.1", 0), Own)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}", Own
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_a_body_that_is_cut_short_is_a_reset() -> None:
    with cutting() as (address, _):
        call = Call.of(QUESTION, "http")
        await call.run(Fronts(address, "", "tiny"))
    assert call.error == RESET


@pytest.mark.parametrize("restarts", [True, False])
def test_only_while_a_router_restarts_a_client_may_ask_again(restarts: bool) -> None:
    with cutting() as (address, server):
        up = cast(UpProcess, SimpleNamespace(model="tiny", http=f"http://{address}"))
        load = Load(up, ["x"])
        if restarts:
            with load.router_restarts():
                load.ask(0)
        else:
            load.ask(0)
        assert server.asked == 1 + restarts
    assert load.answered == restarts
    assert bool(load.failed) == (not restarts)
