"""What a client sends that never ends as a request, against a real uvicorn on loopback."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import socket
import time
import weakref
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import uvloop

from baton.security.tls import server_context
from router.http.protocol import MAX_HEAD_BYTES, MAX_PIPELINED, BoundedHttpProtocol, _Outlet
from router.http.server import client_of
from tests.support.certificates import Authority
from tests.support.router.front_fakes import make_front, serve, silent_after_one

DEADLINE_S = 20.0
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": "tiny", "prompt": "Hello", "user": "x" * (4 * MAX_HEAD_BYTES)})
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY.encode())
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


async def answer(address: str, sent: bytes) -> bytes:
    """The status line of what comes back."""
    host, port = address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        async with asyncio.timeout(DEADLINE_S):
            writer.write(sent)
            return await reader.readline()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("begin", "more", "status"),
    [
        pytest.param(HEAD + b"X: ", b"a" * 4096, b" 400 ", id="a header"),
        pytest.param(HEAD, b"X: a\r\n" * 100, b" 431 ", id="many headers"),
        pytest.param(b"GET /", b"a" * 4096, b" 400 ", id="a path"),
    ],
)
async def test_an_endless_head_is_refused(begin: bytes, more: bytes, status: bytes) -> None:
    # More than it takes: what comes after the answer is read too, so that the answer arrives.
    count = 2 * MAX_HEAD_BYTES // len(more)
    async with serve(make_front().app()) as address:
        assert status in await answer(address, begin + more * count)


async def flood(writer: asyncio.StreamWriter) -> None:
    """Write for ever. Raises ConnectionError once the other side has closed."""
    while True:
        writer.write(b"a" * 4096)
        await writer.drain()
        await asyncio.sleep(0)


async def test_an_endless_chunk_extension_closes_the_connection() -> None:
    async with serve(make_front().app()) as address:
        host, port = address.split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(CHUNKED + b"1;")
        with pytest.raises(ConnectionError):
            await asyncio.wait_for(flood(writer), DEADLINE_S)
        writer.close()


async def test_long_bodies_are_no_heads() -> None:
    async with serve(make_front().app()) as address:
        head = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY)
        assert b" 200 " in await answer(address, head + BODY.encode())
        assert b" 200 " in await answer(address, CHUNKED + CHUNK + b"0\r\n\r\n")


async def test_a_late_head_closes_the_connection() -> None:
    async with serve(make_front().app(), head_s=0.2) as address:
        for begun in (b"", HEAD, b"GET /live HTTP/1.1\r\nHost: x\r\n\r\nGET /li"):
            host, port = address.split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(begun)
            async with asyncio.timeout(DEADLINE_S):
                told = await reader.read()
            assert b" 408 " in told
            assert told.startswith(b"HTTP/1.1 200") is begun.startswith(b"GET")
            writer.close()


async def test_an_answer_may_take_longer_than_a_head() -> None:
    async with serve(make_front(silent_after_one).app(), head_s=0.05) as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"model": "tiny", "prompt": "Hello", "stream": True}).encode()
        # The next head begins, and is late, while the answer to the first one still comes.
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + b"GET /li")
        async with asyncio.timeout(DEADLINE_S):
            assert b" 200 " in await reader.readline()
            while b'"text":"x"' not in await reader.readline():
                pass
        late = asyncio.create_task(reader.read())
        done, _ = await asyncio.wait([late], timeout=0.5)
        assert not done
        late.cancel()
        writer.close()


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n", 200),
        (b"GET /health HTTP/1.1\r\n", 400),
        (b"GET /health HTTP/1.0\r\n", 200),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", 400),
        (b"GET /health HTTP/1.0\r\nHost: localhost\r\nhost: evil.example\r\n", 400),
        (b"GET http://localhost/health HTTP/1.1\r\nHost: evil.example\r\n", 200),
        (b"GET http://[::1]:8000/health HTTP/1.1\r\nHost: evil.example\r\n", 200),
        (b"GET http://evil.example/health HTTP/1.1\r\nHost: localhost\r\n", 403),
        (b"GET http://evil.example:80/health HTTP/1.1\r\nHost: localhost\r\n", 403),
        (b"GET http://localhost/health HTTP/1.1\r\n", 400),
    ],
)
async def test_a_request_names_one_host(head: bytes, status: int) -> None:
    """RFC 9112, sections 3.2 and 3.2.2. A browser's page must not choose another one."""
    async with serve(make_front().app()) as address:
        assert b" %d " % status in await answer(address, head + b"\r\n")


LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def connect(address: str) -> Streams:
    host, port = address.split(":")
    return await asyncio.open_connection(host, int(port))


async def ask(streams: Streams, sent: bytes) -> bytes:
    """The head of the answer; its body is read too."""
    reader, writer = streams
    writer.write(sent)
    async with asyncio.timeout(DEADLINE_S):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        await reader.readexactly(int(length[1]) if length else 0)
    return head


async def closed(streams: Streams) -> None:
    """Return when the server has closed. Raises TimeoutError."""
    reader, writer = streams
    with suppress(ConnectionResetError):
        async with asyncio.timeout(DEADLINE_S):
            while await reader.read(4096):
                pass
    writer.close()


async def test_a_refused_request_whose_body_never_ends_is_closed() -> None:
    front = make_front(require_key=True)
    head = HEAD + b"Content-Length: 1000000000\r\n\r\n"
    async with serve(front.app(), linger_s=0.2) as address:
        streams = await connect(address)
        told = await ask(streams, head + b"x" * 4096)
        assert b" 401 " in told
        assert b"connection: close" in told
        streams[1].write(b"x")
        await closed(streams)


async def test_the_answer_to_an_unread_body_arrives_before_the_connection_ends() -> None:
    front = make_front(require_key=True)
    body = b"x" * (2 << 20)
    async with serve(front.app()) as address:
        reader, writer = await connect(address)
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(DEADLINE_S):
            await writer.drain()
            assert b" 401 " in await reader.readline()
        writer.close()


async def test_a_refused_request_that_was_read_keeps_its_connection() -> None:
    front = make_front(require_key=True)
    async with serve(front.app()) as address:
        streams = await connect(address)
        asked = HEAD + b"Content-Length: 2\r\n\r\n{}"
        assert b" 401 " in await ask(streams, asked)
        assert b" 200 " in await ask(streams, LIVE)
        streams[1].close()


async def test_what_is_no_request_does_not_keep_a_connection_open() -> None:
    async with serve(make_front().app(), keep_alive_s=0.3) as address:
        streams = await connect(address)
        assert b" 200 " in await ask(streams, LIVE)

        async def send_empty_lines() -> None:
            while True:
                streams[1].write(b"\r\n")
                await asyncio.sleep(0.02)

        sending = asyncio.create_task(send_empty_lines())
        try:
            await closed(streams)
        finally:
            sending.cancel()


async def test_requests_that_wait_on_a_connection_are_bounded() -> None:
    async with serve(make_front(silent_after_one).app()) as address:
        streams = await connect(address)
        body = json.dumps({"model": "tiny", "prompt": "Hello", "stream": True}).encode()
        first = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
        streams[1].write(first + LIVE * (MAX_PIPELINED + 1))
        await closed(streams)


async def test_a_client_that_leaves_ends_a_request_that_others_wait_for() -> None:
    front = make_front(silent_after_one)
    async with serve(front.app()) as address:
        reader, writer = await connect(address)
        body = json.dumps({"model": "tiny", "prompt": "Hello", "stream": True}).encode()
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body + LIVE)
        async with asyncio.timeout(DEADLINE_S):
            assert b" 200 " in await reader.readline()
            writer.close()
            await front.dispatcher.closed.wait()


async def test_connections_of_a_client_are_bounded() -> None:
    async with serve(make_front().app(), max_per_client=2) as address:
        kept = [await connect(address) for _ in range(2)]
        for streams in kept:
            assert b" 200 " in await ask(streams, LIVE)
        reader, writer = await connect(address)
        async with asyncio.timeout(DEADLINE_S):
            told = await reader.read()
        writer.close()
        head, _, said = told.partition(b"\r\n\r\n")
        assert b" 503 " in head
        assert b"content-length: %d\r\n" % len(said) in head
        # One that goes makes room for another.
        kept[0][1].close()
        async with asyncio.timeout(DEADLINE_S):
            while b" 200 " not in await answer(address, LIVE):
                await asyncio.sleep(0.01)
        kept[1][1].close()


async def test_a_new_connection_takes_the_place_of_the_one_that_has_waited_longest() -> None:
    async with serve(make_front(silent_after_one).app(), max_connections=3) as address:
        running = await connect(address)
        body = json.dumps({"model": "tiny", "prompt": "Hello", "stream": True}).encode()
        running[1].write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(DEADLINE_S):
            assert b" 200 " in await running[0].readline()
        slow, kept = await connect(address), await connect(address)
        slow[1].write(b"GET /li")
        assert b" 200 " in await ask(kept, LIVE)
        newest = await connect(address)
        assert b" 200 " in await ask(newest, LIVE)
        await closed(slow)
        # It has waited since its answer, and the newest since its own.
        last = await connect(address)
        assert b" 200 " in await ask(last, LIVE)
        await closed(kept)
        assert not running[0].at_eof()
        for _, writer in (running, newest, last):
            writer.close()


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(HEAD, id="half a head"),
        pytest.param(HEAD + b"Content-Length: 1000000000\r\n\r\n", id="a body that is refused"),
        pytest.param(b"no request\r\n\r\n", id="no request"),
        pytest.param(LIVE, id="a request"),
        pytest.param(LIVE * (MAX_PIPELINED - 1), id="requests behind one another"),
    ],
)
async def test_a_connection_that_has_gone_leaves_no_cycles(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The garbage collector would hold up all others."""
    made: list[weakref.ref[BoundedHttpProtocol]] = []
    make = BoundedHttpProtocol.__init__

    def make_known(protocol: BoundedHttpProtocol, *args: Any, **more: Any) -> None:
        make(protocol, *args, **more)
        made.append(weakref.ref(protocol))

    monkeypatch.setattr(BoundedHttpProtocol, "__init__", make_known)
    async with serve(make_front().app()) as address:
        gc.disable()
        try:
            for _ in range(3):
                _, writer = await connect(address)
                writer.write(sent)
                await asyncio.sleep(0.05)
                writer.transport.abort()
            async with asyncio.timeout(DEADLINE_S):
                while len(made) < 3 or any(one() for one in made):
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


async def test_a_listener_full_of_running_requests_refuses_more() -> None:
    async with serve(make_front(silent_after_one).app(), max_connections=2) as address:
        body = json.dumps({"model": "tiny", "prompt": "Hello", "stream": True}).encode()
        running = [await connect(address) for _ in range(2)]
        for reader, writer in running:
            writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            async with asyncio.timeout(DEADLINE_S):
                assert b" 200 " in await reader.readline()
        assert b" 503 " in await answer(address, b"")
        for _, writer in running:
            writer.close()


async def test_a_tls_handshake_that_does_not_end_is_cut(tmp_path: Path) -> None:
    files = Authority(tmp_path).sign("front", "router")
    context = server_context(replace(files, authority=None))
    async with serve(make_front().app(), context=context, head_s=0.2) as address:
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01"):
            streams = await connect(address)
            streams[1].write(sent)
            await closed(streams)


async def test_connections_are_unbounded_by_default() -> None:
    async with serve(make_front().app()) as address:
        host, port = address.split(":")
        kept = [await asyncio.open_connection(host, int(port)) for _ in range(100)]
        assert b" 200 " in await answer(address, LIVE)
        for _, writer in kept:
            writer.close()


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("::ffff:10.1.2.3", "10.1.2.3"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
    ],
)
def test_an_ipv6_network_counts_as_one_client(address: str, client: str) -> None:
    assert client_of((address, 80)) == client


@pytest.mark.parametrize("has_asked", [False, True], ids=["its first", "its next"])
def test_a_request_that_came_while_the_router_stood_still_is_answered(*, has_asked: bool) -> None:
    """In the loop that routers use, whose timers may run before what has come is read."""
    asks = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"

    async def ask_amid_a_pause() -> None:
        loop = asyncio.get_running_loop()
        here, there = socket.socketpair()
        app = make_front().app()
        async with serve(app, head_s=0.3, keep_alive_s=0.3) as address:
            host, port = address.split(":")
            client = socket.create_connection((host, int(port)))
            client.setblocking(False)

            def stand_still() -> None:
                """While others of the sockets that were found to be ready are read."""
                there.recv(1)
                client.send(asks)
                time.sleep(0.6)

            with here, there, client:
                loop.add_reader(there, stand_still)
                async with asyncio.timeout(DEADLINE_S):
                    if has_asked:
                        client.send(asks)
                        assert b" 200 " in await loop.sock_recv(client, 4096)
                    await asyncio.sleep(0.05)
                    here.send(b"x")
                    assert b" 200 " in await loop.sock_recv(client, 4096)
                loop.remove_reader(there)

    uvloop.run(ask_amid_a_pause())


# Writes


class Sent:
    """A connection's transport that keeps what is written, one item for each call."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.writes.append(data)


def outlet_of(sent: Sent, protocol: SimpleNamespace) -> _Outlet:
    return _Outlet(cast(asyncio.Transport, sent), cast(BoundedHttpProtocol, protocol))


def test_a_head_and_the_first_part_are_one_write_and_every_part_is_one_more() -> None:
    sent = Sent()
    ends: list[int] = []
    flow = SimpleNamespace(write_paused=False)
    protocol = SimpleNamespace(is_ending=False, flow=flow, end=lambda: ends.append(1))
    outlet = outlet_of(sent, protocol)
    outlet.hold_next()
    outlet.write(b"head ")
    assert sent.writes == []
    outlet.write(b"first")
    outlet.write_part(b"data: x\n\n")
    assert sent.writes == [b"head first", b"9\r\ndata: x\n\n\r\n"]
    assert outlet.has_room
    flow.write_paused = True
    assert not outlet.has_room
    outlet.hold_next()
    outlet.write(b"head")
    outlet.close()
    assert (sent.writes[2:], ends) == ([b"head"], [1]), "a head without a body is written, too"
    protocol.is_ending = True
    outlet.write_part(b"more")
    outlet.detach()
    outlet.write_part(b"more")
    assert len(sent.writes) == 3
