"""Requests as clients and proxies write them, against a real server on loopback."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path

import pytest

from baton.config.advanced import AdvancedConfig
from baton.request import FinishReason
from router.core.request import GenerationRequest, OutputDelta
from tests.support.router.front_fakes import listening_socket, make_front, serve, silent_after_one

DEADLINE_S = 20.0
BODY = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 2}).encode()
STREAM = json.dumps({"model": "tiny", "prompt": "Hello", "stream": True}).encode()
JSON_TYPE = b"Host: x\r\nContent-Type: application/json\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
LONGEST_POOL_S = 90.0
"""Idle time of the pools of Go's transports; those of nginx and ALB are shorter."""


def post(version: bytes, headers: bytes, body: bytes = BODY, *, chunked: bool = False) -> bytes:
    """A completion's bytes."""
    if chunked:
        framing, sent = b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        framing, sent = b"Content-Length: %d" % len(body), body
    head = b"POST /v1/completions HTTP/%b\r\n%b%b%b\r\n\r\n" % (
        version,
        JSON_TYPE,
        headers,
        framing,
    )
    return head + sent


async def told(address: str, sent: bytes, *, ends: bool = False) -> bytes:
    """All that comes back for ``sent`` until the server closes. ``ends``: the client closes its
    side first."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(sent)
            if ends:
                writer.write_eof()
            return await reader.read()
    finally:
        writer.close()


OFFERS = {
    "Java's": b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n",
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n",
    "TLS": b"Upgrade: TLS/1.0\r\nConnection: upgrade\r\n",
}
LAST = b"GET /live HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunks"])
@pytest.mark.parametrize("offer", OFFERS.values(), ids=OFFERS)
async def test_an_upgrade_that_is_not_taken_is_ignored(offer: bytes, *, chunked: bool) -> None:
    """As the first request of a connection and as a later one, after which the connection goes
    on, whatever pieces the bytes come in."""
    sent = (LIVE + post(b"1.1", offer, chunked=chunked)) * 2 + LAST
    async with serve(make_front().app()) as address:
        assert (await told(address, sent)).count(b"HTTP/1.1 200") == 5
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        request = post(b"1.1", offer, chunked=chunked) + LAST
        for place in range(0, len(request), 7):
            writer.write(request[place : place + 7])
            await asyncio.sleep(0)
        async with asyncio.timeout(DEADLINE_S):
            assert (await reader.read()).count(b"HTTP/1.1 200") == 2
        writer.close()


async def test_an_offer_hides_no_request_from_a_proxy() -> None:
    """What a proxy takes for a body stays a body."""
    hidden = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    sent = post(b"1.1", OFFERS["websocket"], hidden) + LAST
    async with serve(make_front().app()) as address:
        statuses = re.findall(rb"HTTP/1.1 (\d+)", await told(address, sent))
    assert statuses == [b"400", b"200"]


JAVA = """
import java.net.URI;
import java.net.http.*;

public class Client {
    public static void main(String[] given) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int i = 0; i < 3; i++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(given[0]))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(given[1])).build();
            HttpResponse<String> answer =
                client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body().contains("text"));
        }
    }
}
"""


@pytest.mark.skipif(shutil.which("java") is None, reason="java is not installed")
async def test_the_http_client_of_java_is_answered(tmp_path: Path) -> None:
    source = tmp_path / "Client.java"
    source.write_text(JAVA, encoding="utf-8")
    async with serve(make_front().app()) as address:
        for body in (BODY, STREAM):
            command = ["java", "-XX:TieredStopAtLevel=1", str(source)]
            command += [f"http://{address}/v1/completions", body.decode()]
            done = await asyncio.to_thread(
                subprocess.run, command, capture_output=True, text=True, timeout=120, check=False
            )
            assert done.stdout.split() == ["200", "true"] * 3, done.stderr


@pytest.mark.parametrize(
    "path", ["/health", "/live", "/version", "/v1/models", "/v1/model/info", "/metrics", "/none"]
)
async def test_head_is_get_without_the_body(path: str) -> None:
    async with serve(make_front().app()) as address:
        heads = {}
        for method in (b"GET", b"HEAD"):
            sent = b"%b %b HTTP/1.1\r\n%bConnection: close\r\n\r\n" % (
                method,
                path.encode(),
                JSON_TYPE,
            )
            head, _, body = (await told(address, sent)).partition(b"\r\n\r\n")
            lines = head.lower().split(b"\r\n")
            changing: tuple[bytes, ...] = (b"x-request-id", b"date", b"transfer-encoding")
            if path == "/metrics":
                changing += (b"content-length",)
            heads[method] = [line for line in lines if not line.startswith(changing)]
            assert bool(body) is (method == b"GET")
        assert heads[b"HEAD"] == heads[b"GET"]


async def test_head_of_a_post_is_refused() -> None:
    async with serve(make_front().app()) as address:
        sent = b"HEAD /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        assert (await told(address, sent)).startswith(b"HTTP/1.1 405")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"GET http://localhost HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET http://localhost?a=b HTTP/1.1\r\nHost: x\r\n\r\n", 404),
        (b"GET http://user:word@localhost/live HTTP/1.1\r\nHost: x\r\n\r\n", 200),
        (b"GET http://evil.example/live HTTP/1.0\r\n\r\n", 403),
        (b"GET http://localhost/live HTTP/1.0\r\n\r\n", 200),
        (b"GET http:///live HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET localhost:80 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost:\r\n\r\n", 200),
        (b"GET /live HTTP/1.1\r\nHost: localhost, evil\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: a b\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: http://localhost\r\n\r\n", 400),
        (b"GET /live HTTP/1.1\r\nHost: [::1]:8000\r\n\r\n", 200),
        (LIVE + b"GET http://evil.example/live HTTP/1.1\r\nHost: x\r\n\r\n", 403),
        (b"CONNECT localhost:80 HTTP/1.1\r\nHost: x\r\n\r\n", 501),
        (b"GET /live HTTP/2.0\r\nHost: x\r\n\r\n", 505),
        (b"GET /live HTTP/0.9\r\nHost: x\r\n\r\n", 505),
        (post(b"1.0", b"", chunked=True), 400),
        (post(b"1.1", b"Transfer-Encoding: gzip\r\n", chunked=True), 501),
        (post(b"1.1", b"", chunked=True).replace(b": chunked", b": gzip, chunked"), 501),
    ],
)
async def test_a_head_is_read_by_one_rule(sent: bytes, status: int) -> None:
    """RFC 9112, sections 2.3, 3.2 and 6.1."""
    async with serve(make_front().app(), keep_alive_s=0.2) as address:
        statuses = re.findall(rb"HTTP/1.1 (\d+)", await told(address, sent))
    assert int(statuses[-1]) == status


KEPT = b"GET /live HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"


async def test_a_client_of_http_1_0_may_keep_its_connection() -> None:
    async with serve(make_front().app()) as address:
        answers = await told(address, KEPT * 2 + b"GET /live HTTP/1.0\r\n\r\n" + LIVE)
    assert answers.count(b"HTTP/1.1 200") == 3
    assert answers.count(b"connection: keep-alive") == 2
    assert answers.count(b"connection: close") == 1


@pytest.mark.parametrize("kept", [b"", b"Connection: keep-alive\r\n"])
async def test_a_client_of_http_1_0_gets_no_chunks(kept: bytes) -> None:
    async with serve(make_front().app()) as address:
        head, _, body = (await told(address, post(b"1.0", kept, STREAM))).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    events = body.decode().split("\n\n")
    assert all(event.startswith("data: ") for event in events[:-1])
    assert events[-2:] == ["data: [DONE]", ""]


async def briefly(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    await asyncio.sleep(0.05)
    yield OutputDelta("x", (65,), FinishReason.STOP)


@pytest.mark.parametrize("body", [BODY, STREAM], ids=["whole", "stream"])
async def test_a_client_that_sends_no_more_gets_its_answers(body: bytes) -> None:
    async with serve(make_front(briefly).app()) as address:
        answers = await told(address, post(b"1.1", b"", body) + LIVE, ends=True)
    assert answers.count(b"HTTP/1.1 200") == 2


async def test_a_client_that_sends_no_more_and_waits_long_gets_an_end() -> None:
    front = make_front(silent_after_one)
    async with serve(front.app(), linger_s=0.1) as address:
        assert await told(address, post(b"1.1", b""), ends=True) == b""
        await asyncio.wait_for(front.dispatcher.closed.wait(), DEADLINE_S)


async def test_connection_close_is_obeyed() -> None:
    async with serve(make_front().app()) as address:
        answers = await told(address, LAST + LIVE)
    assert answers.count(b"HTTP/1.1 200") == 1
    assert b"connection: close" in answers


def test_an_idle_connection_outlives_the_pool_of_a_proxy() -> None:
    assert AdvancedConfig().keep_alive_s > LONGEST_POOL_S


NGINX_PAGE = Path(__file__).parents[4] / "docs/how-to/operate/proxies.md"


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
async def test_nginx_as_documented_passes_streams_and_keeps_connections(tmp_path: Path) -> None:
    snippet = re.search(r"```nginx\n(.*?)```", NGINX_PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert snippet
    with closing(listening_socket()) as listener:
        port = listener.getsockname()[1]
    async with serve(make_front().app()) as address:
        text = snippet[1].replace("127.0.0.1:8000", address)
        text = text.replace("listen 8080", f"listen 127.0.0.1:{port}")
        temporary = "".join(
            f"{name}_temp_path {tmp_path}/{name};\n"
            for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        file = tmp_path / "nginx.conf"
        file.write_text(
            f"daemon off; pid {tmp_path}/pid; error_log stderr; events {{}}\n"
            f"http {{ access_log off; {temporary}{text} }}",
            encoding="utf-8",
        )
        proxy = await asyncio.create_subprocess_exec("nginx", "-c", str(file))
        try:
            async with asyncio.timeout(DEADLINE_S):
                while not (tmp_path / "pid").exists():
                    await asyncio.sleep(0.01)
            sent = post(b"1.1", b"Connection: close\r\n", STREAM)
            for _ in range(3):
                answer = await told(f"127.0.0.1:{port}", sent)
                assert answer.startswith(b"HTTP/1.1 200")
                assert b"data: [DONE]" in answer
        finally:
            proxy.terminate()
            await proxy.wait()
