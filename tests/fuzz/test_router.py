"""A whole router under what its fuzzer makes up, for a short time; and the worst that it found."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from loadtest.router import http2_client
from loadtest.router.http2_client import call_headers, frame
from loadtest.router.router_process import forget_peak, peak_memory
from tests.fuzz.openapi import router_model
from tests.fuzz.router import MAX_GROWTH, MAX_HOLD_S, fuzz, fuzzed_router
from tests.fuzz.router_inputs import KEY, KINDS, Input, Kind, make_input

_PREFACE = http2_client.PREFACE + frame(http2_client.SETTINGS, 0, 0)
_POST = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
_CHUNKED = b"transfer-encoding: chunked\r\n"
_AUTHORIZED = f"authorization: Bearer {KEY}\r\n".encode()
_LIVE = b"GET /live HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"
_HEALTH, _GENERATE = "/grpc.health.v1.Health/Check", "/baton.v1.InferenceService/Generate"
_BEGUN = frame(http2_client.HEADERS, 0, 1, call_headers(_HEALTH))
_CONTINUATION = 9


def _calls(path: str, count: int, *more: bytes, key: str = "") -> bytes:
    headers = call_headers(path, [("authorization", f"Bearer {key}")] if key else ())
    return _PREFACE + b"".join(
        frame(http2_client.HEADERS, http2_client.END_HEADERS, 2 * number + 1, headers)
        + b"".join(frame(one[0], one[1], 2 * number + 1, one[2:]) for one in more)
        for number in range(count)
    )


_RESET = bytes((http2_client.RST_STREAM, 0, 0, 0, 0, 8))
_NO_MESSAGE = bytes((http2_client.DATA, http2_client.END_STREAM, 0, 0, 0, 0, 2, 255, 255))
WORST: dict[str, tuple[Kind, bytes]] = {
    "pipelined requests": ("http", _LIVE * 20_000),
    "small headers": ("http", _POST + b"a:b\r\n" * 200_000),
    "a header": ("http", _POST + b"a: " + b"b" * (1 << 20)),
    "small chunks, refused": ("http", _POST + _CHUNKED + b"\r\n" + b"1\r\na\r\n" * 150_000),
    "small chunks": (
        "http",
        _POST + _AUTHORIZED + _CHUNKED + b"\r\n" + b"1\r\na\r\n" * 150_000,
    ),
    "upgrades": ("http", _LIVE[:-2] + b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"),
    "what is no HTTP": ("http", b"\x16\x03\x01" * 100_000),
    "calls that are given up": (
        "http2",
        _calls(_GENERATE, 1000, _RESET),
    ),
    "messages that are none": (
        "http2",
        _calls("/baton.v1.TokenService/Tokenize", 500, _NO_MESSAGE, key=KEY),
    ),
    "health calls without a message": ("http2", _calls(_HEALTH, 1000)),
    "unknown methods": ("http2", _calls("/a.B/C", 1000)),
    "a method that is no text": ("http2", _calls("/baton.v1.TokenService/Tokeni\udcffe", 3)),
    "a key that is no text": ("http2", _calls(_GENERATE, 3, key="a\udcff")),
    "pings": ("http2", _PREFACE + frame(http2_client.PING, 0, 0, bytes(8)) * 10_000),
    "settings": ("http2", _PREFACE + frame(http2_client.SETTINGS, 0, 0) * 10_000),
    "a farewell with control characters": (
        "http2",
        _PREFACE + frame(http2_client.GOAWAY, 0, 0, bytes(7) + b"\x02\x1b[2J\x00forged\xff"),
    ),
    "headers that do not end": ("http2", _PREFACE + _BEGUN + frame(_CONTINUATION, 0, 1) * 10_000),
}


def test_an_input_is_made_of_its_number() -> None:
    for kind in KINDS:
        made = [make_input(kind, number) for number in range(20)]
        assert made == [make_input(kind, number) for number in range(20)]
        assert len({one.pieces for one in made}) > 8


def test_some_inputs_upload_files() -> None:
    sent = [b"".join(make_input("http", number).pieces) for number in range(300)]
    assert any(b"form-data" in one and b"custom_id" in one for one in sent)


async def test_the_worst_inputs_hold_no_router(tmp_path: Path) -> None:
    model = await asyncio.to_thread(router_model, tmp_path)
    async with fuzzed_router(model, tmp_path / "router.log") as router:
        assert await router.fault() == ""
        for name, (kind, sent) in WORST.items():
            one = Input(kind, 0, (sent,))
            before = forget_peak(router.router.process)
            hold_s = await router.confirmed_hold(one, await router.hold(one))
            growth = peak_memory(router.router.process) - before
            assert hold_s <= MAX_HOLD_S, f"{name}: {hold_s * 1e3:.0f} ms"
            assert growth <= MAX_GROWTH, f"{name}: {growth >> 20} MiB"
            assert await router.fault() == "", name


@pytest.mark.long
async def test_what_strangers_make_up_holds_no_router(tmp_path: Path) -> None:
    model = await asyncio.to_thread(router_model, tmp_path)
    found = await fuzz(1.0, model, tmp_path)
    assert found.faults == []
    assert found.inputs > 100
