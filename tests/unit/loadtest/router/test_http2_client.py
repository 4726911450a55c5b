from __future__ import annotations

import asyncio

from loadtest.router.http2_client import Http2Connection, call_headers, header_block
from loadtest.router.stranger_load import GENERATE, WATCH
from tests.support.router.access_access import key
from tests.support.router.front_fakes import make_front
from tests.support.router.grpc_inference import serve_at

DEADLINE_S = 20.0


async def connect(address: str) -> Http2Connection:
    host, port = address.split(":")
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_connection(Http2Connection, host, int(port))
    return protocol


def test_long_headers_have_their_length() -> None:
    # RFC 7541, 5.1: 7 bits of the first byte, then 7 bits of each, the lowest first.
    assert header_block([("a", "x" * 127)]) == b"\x00\x01a\x7f\x00" + b"x" * 127
    assert header_block([("a", "x" * 1337)])[3:6] == b"\x7f\xba\x09"


async def test_a_servers_frames_are_understood() -> None:
    front = make_front(keys=(key("asks", "inference"),), require_key=True)
    async with serve_at(front) as address, asyncio.timeout(DEADLINE_S):
        there = await connect(address)
        there.call(1, call_headers(WATCH), b"")
        there.call(3, call_headers(GENERATE), b"", 60 << 20)
        while not (there.answered[1] and 3 in there.ended):
            there.changed.clear()
            await there.changed.wait()
        assert there.max_streams
        assert 1 not in there.ended
        assert not there.closed.is_set()
        there.close()
