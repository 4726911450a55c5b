"""What the router's fuzzer sends: HTTP/1.1, frames of HTTP/2, and messages of gRPC's methods.

Every input is made from a number, so that a number is all that is kept of one.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from baton.v1 import cache_pb2, control_pb2, inference_pb2, tokens_pb2
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.router import http2_client
from loadtest.router.http2_client import call_headers, frame
from tests.fuzz.bodies import BODIES, FIELDS, batch_file, plausible_body

KEY = "sk-fuzz"
Kind = Literal["http", "http2", "grpc"]
KINDS: tuple[Kind, ...] = ("http", "http2", "grpc")
_UPLOADS, _BOUNDARY = "/v1/files", "boundary"
_MAX_DEPTH = 4
_MAX_BYTES = 1 << 20
"""Larger inputs take memory by their size alone."""
_PATHS = (
    *BODIES,
    *(_UPLOADS, _UPLOADS, "/v1/models", "/v1/model/info", "/v1/usage?by=agent", "/v1/feedback/a"),
    *("/v1/usage?by=day,key&start=2026-01-01&end=2026-01-02", "/v1/cache/prefixes/prefix_00"),
    *("/health", "/live", "/ping", "/version", "/load", "/openapi.json", "/console"),
    *("/metrics", "/metrics/summary", "/metrics/targets", "/console/snapshot", "/v1/workers"),
    *("/v1/cluster", "/v1/cache", "/v1/cache/stats", "/v1/pools/x/scale", "/v1/batches/batch_0"),
    *("/%2e%2e/", "/v1/chat/completions?" + "a=b&" * 500, "*", "http://x/live", "/" + "%41" * 2000),
)
_METHODS = ("GET", "POST", "DELETE", "OPTIONS", "HEAD", "PUT", "PRI", "CONNECT", "get", "")
_VERSIONS = ("HTTP/1.1", "HTTP/1.0", "HTTP/2.0", "HTTP/0.9", "HTTP/1.1 ", "")
_VALUES: tuple[Any, ...] = (
    *(None, True, 0, -1, 1, 0.5, 2**31, 2**63, 2**64, -(2**63), 1e308, 1e-308, "", "a", "ü" * 999),
    *(
        ["a"],
        [[0]],
        [None] * 99,
        [0] * 2000,
        {},
        {"type": "json_object"},
        {"a": {"b": [{}]}},
        "\ud83d",
    ),
    *("x" * 70_000, ["stop"] * 999, {str(number): 1 for number in range(500)}, "{{ 1 }}", "\x00"),
)
_FIELDS = ("model", "suffix", "length_penalty", "functions", *FIELDS)
_FILES = (
    *(inference_pb2.DESCRIPTOR, tokens_pb2.DESCRIPTOR, cache_pb2.DESCRIPTOR),
    *(control_pb2.DESCRIPTOR, health_pb2.DESCRIPTOR),
)
"""Those whose services a router has, or might be thought to have."""
_BUSY = ("GenerateRequest", "TokenizeRequest", "DetokenizeRequest")
"""What most calls send."""


@dataclass(frozen=True, slots=True)
class Input:
    """One input: what is sent, in pieces, or a message to a method."""

    kind: Kind
    number: int
    pieces: tuple[bytes, ...]
    method: str = ""
    """Of gRPC, whose message is the only piece."""
    has_key: bool = False


def make_input(kind: Kind, number: int) -> Input:
    """The input of a number."""
    dice = random.Random(f"{kind}-{number}")
    return {"http": _http, "http2": _http2, "grpc": _grpc}[kind](dice, number)


def _cut(dice: random.Random, data: bytes) -> tuple[bytes, ...]:
    """In a few pieces, as a network may."""
    places = sorted(dice.randrange(len(data) + 1) for _ in range(dice.choice((0, 0, 1, 3))))
    ends = [*places, len(data)]
    return tuple(data[begin:end] for begin, end in zip([0, *places], ends, strict=True))


def _mutated(dice: random.Random, data: bytes) -> bytes:
    """With some bytes changed, removed or repeated, most often none."""
    changed = bytearray(data)
    for _ in range(dice.choice((0, 0, 0, 1, 2, 8))):
        at = dice.randrange(len(changed) + 1)
        match dice.randrange(4):
            case 0:
                changed[at:at] = dice.randbytes(dice.choice((1, 4, 64)))
            case 1:
                del changed[at : at + dice.choice((1, 4, 64))]
            case 2:
                part = bytes(changed[at : at + dice.choice((8, 64, 1024))])
                changed[at:at] = part * dice.choice((1, 10, 500))
            case _:
                changed[at : at + 1] = dice.choice((b"\r", b"\n", b"\x00", b"\xff", b":", b" "))
    return bytes(changed)


# HTTP/1.1


def _http(dice: random.Random, number: int) -> Input:
    has_key = dice.random() < 0.6
    requests = dice.choice((1, 1, 1, 2, 9))
    data = b"".join(_request(dice, has_key=has_key) for _ in range(requests))
    if dice.random() < 0.05:
        data *= dice.choice((50, 1000))
    return Input("http", number, _cut(dice, _mutated(dice, data)[:_MAX_BYTES]), has_key=has_key)


def _request(dice: random.Random, *, has_key: bool) -> bytes:
    method = dice.choice(_METHODS) if dice.random() < 0.2 else dice.choice(("GET", "POST"))
    version = dice.choice(_VERSIONS) if dice.random() < 0.1 else "HTTP/1.1"
    headers = [("host", "127.0.0.1"), ("content-type", "application/json")]
    if has_key:
        headers.append(("authorization", f"Bearer {KEY}"))
    for _ in range(dice.choice((0, 0, 1, 3))):
        headers.append(_header(dice))
    if dice.random() < 0.03:
        headers += [("a", "")] * dice.choice((127, 500, 5000))
    path = dice.choice(tuple(BODIES) if dice.random() < 0.5 else _PATHS)
    body = _body(dice, path) if method == "POST" else b""
    if path == _UPLOADS and method == "POST":
        headers[1] = ("content-type", "multipart/form-data; boundary=" + _BOUNDARY)
        body = _form(dice)
    if dice.random() < 0.3:
        headers.append(("transfer-encoding", "chunked"))
        body = _chunked(dice, body)
    elif body or dice.random() < 0.1:
        length = len(body) if dice.random() < 0.9 else dice.choice((0, 1, 10**9, 10**30))
        headers.append(("content-length", str(length)))
    dice.shuffle(headers)
    lines = [
        f"{method} {path} {version}",
        *(f"{n}: {v}" for n, v in headers),
        "",
        "",
    ]
    return "\r\n".join(lines).encode(errors="replace") + body


def _header(dice: random.Random) -> tuple[str, str]:
    names = (
        "expect",
        "connection",
        "upgrade",
        "content-length",
        "x-request-id",
        "traceparent",
        "te",
    )
    more = (
        "x-api-key",
        "authorization",
        "accept",
        "origin",
        "cookie",
        "x-deadline-ms",
        "host",
        "\t",
    )
    values = (
        "100-continue",
        "close",
        "keep-alive, upgrade",
        "h2c",
        "websocket",
        "0",
        "-1",
        "chunked",
    )
    long = ("x" * 9000, "a," * 3000, "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "", "ü", "\x01")
    return dice.choice(names + more), dice.choice(values + long)


def _chunked(dice: random.Random, body: bytes) -> bytes:
    size = dice.choice((1, 7, 4096, 1 << 20))
    extension = b";a=b" if dice.random() < 0.1 else b""
    parts = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts)
    return chunks + dice.choice((b"0\r\n\r\n", b"0\r\n\r\n", b"", b"0\r\na: b\r\n\r\n", b"-1\r\n"))


def _body(dice: random.Random, path: str) -> bytes:
    if path in BODIES and dice.random() < 0.8:
        fields = plausible_body(dice, path, SERVED_NAME)
    else:
        messages = [{"role": dice.choice(("tool", "x", "system")), "content": None}] * 9
        fields = {"model": SERVED_NAME, "messages": messages}
    for _ in range(dice.choice((0, 1, 2, 5))):
        fields[dice.choice(_FIELDS)] = dice.choice(_VALUES)
    text = json.dumps(fields).encode()
    if dice.random() < 0.1:
        depth = dice.choice((10, 199, 5000))
        text = b'{"a":' * depth + text + b"}" * depth
    return text


def _form(dice: random.Random) -> bytes:
    """A file and its purpose, as multipart/form-data."""
    file = 'name="file"; filename=' + dice.choice(('"a.jsonl"', '""', '"ü\\"', "x" * 9000))
    parts = [('name="purpose"', b"batch"), (file, batch_file(dice, SERVED_NAME))]
    if dice.random() < 0.2:
        parts.append(dice.choice((('name="expires_after[anchor]"', b"x"), ("", b""), parts[1])))
        dice.shuffle(parts)
    if dice.random() < 0.05:
        parts *= dice.choice((20, 1000))
    return (
        b"".join(
            f"--{_BOUNDARY}\r\ncontent-disposition: form-data; {name}\r\n\r\n".encode()
            + data
            + b"\r\n"
            for name, data in parts
        )
        + dice.choice((f"--{_BOUNDARY}--\r\n", f"--{_BOUNDARY}--\r\n", "", "--")).encode()
    )


# HTTP/2


def _http2(dice: random.Random, number: int) -> Input:
    has_key = dice.random() < 0.5
    data = http2_client.PREFACE + frame(http2_client.SETTINGS, 0, 0)
    streams = 1
    for _ in range(dice.choice((1, 5, 50))):
        made = dice.choice((_random_frame, _call, _call, _reset, _flood))
        data += made(dice, streams, has_key)
        streams += 2
    if dice.random() < 0.5:
        data = _mutated(dice, data)
    return Input("http2", number, _cut(dice, data[:_MAX_BYTES]), has_key=has_key)


def _metadata(has_key: bool) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEY}"),) if has_key else ()


def _random_frame(dice: random.Random, stream: int, has_key: bool) -> bytes:
    size = dice.choice((0, 1, 4, 6, 8, 100, 16384, 20000))
    number = dice.choice((0, stream, stream + 1, 1, 2**31 - 1))
    return frame(dice.randrange(12), dice.randrange(256), number, dice.randbytes(size))


def _call(dice: random.Random, stream: int, has_key: bool) -> bytes:
    method, message = _random_call(dice)
    headers = call_headers(method, _metadata(has_key))
    size = len(message) if dice.random() < 0.8 else dice.choice((0, 2**32 - 1, 60 << 20))
    content = bytes((dice.choice((0, 0, 0, 1, 255)),)) + size.to_bytes(4, "big") + message
    parts = [content[at : at + 16384] for at in range(0, len(content), 16384)]
    ends = http2_client.END_STREAM if dice.random() < 0.8 else 0
    head = frame(http2_client.HEADERS, http2_client.END_HEADERS, stream, headers)
    frames = [frame(http2_client.DATA, 0, stream, part) for part in parts]
    return head + b"".join(frames) + frame(http2_client.DATA, ends, stream)


def _reset(dice: random.Random, stream: int, has_key: bool) -> bytes:
    """A call that is given up at once."""
    end = frame(http2_client.RST_STREAM, 0, stream, bytes((0, 0, 0, 8)))
    return _call(dice, stream, has_key) + end


def _flood(dice: random.Random, stream: int, has_key: bool) -> bytes:
    """The same small frame many times."""
    kinds: Sequence[Callable[[], bytes]] = (
        lambda: frame(http2_client.PING, 0, 0, bytes(8)),
        lambda: frame(http2_client.SETTINGS, 0, 0),
        lambda: frame(http2_client.WINDOW_UPDATE, 0, 0, bytes((0, 0, 0, 1))),
        lambda: frame(http2_client.HEADERS, 0, stream, call_headers("/live")),
        lambda: frame(9, 0, stream, b""),
    )
    return dice.choice(kinds)() * dice.choice((10, 1000))


# gRPC


def _public_methods() -> list[MethodDescriptor]:
    services = [one for file in _FILES for one in file.services_by_name.values()]
    return [method for service in services for method in service.methods]


def _random_call(dice: random.Random) -> tuple[str, bytes]:
    methods = _public_methods()
    busy = [one for one in methods if one.input_type.name in _BUSY]
    method = dice.choice(busy if dice.random() < 0.7 else methods)
    message = random_message(dice, method.input_type)
    content = message.SerializePartialToString()
    if dice.random() < 0.2:
        content = _mutated(dice, content)
    return f"/{method.containing_service.full_name}/{method.name}", content[:_MAX_BYTES]


def _grpc(dice: random.Random, number: int) -> Input:
    method, content = _random_call(dice)
    return Input("grpc", number, (content,), method, has_key=dice.random() < 0.8)


def random_message(dice: random.Random, kind: Descriptor, depth: int = 0) -> Message:
    """A message with fields of any value."""
    message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if dice.random() < 0.4 or (field.message_type and depth >= _MAX_DEPTH):
            continue
        _set(dice, message, field, depth)
    return message


def _set(dice: random.Random, message: Message, field: FieldDescriptor, depth: int) -> None:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return
    if field.is_repeated:
        count = dice.choice((0, 1, 3, 40 if inner else 2000))
        values = getattr(message, field.name)
        for _ in range(count):
            if inner is not None:
                values.add().CopyFrom(random_message(dice, inner, depth + 1))
            else:
                values.append(_scalar(dice, field))
    elif inner is not None:
        getattr(message, field.name).CopyFrom(random_message(dice, inner, depth + 1))
    else:
        setattr(message, field.name, _scalar(dice, field))


def _scalar(dice: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            texts = ("", "a", SERVED_NAME, "Hello", "ü" * 50, "x" * 20_000, "{", "user", "\x00")
            text = dice.choice(texts)
            return text.encode() if field.type == FieldDescriptor.TYPE_BYTES else text
        case FieldDescriptor.CPPTYPE_BOOL:
            return dice.random() < 0.5
        case FieldDescriptor.CPPTYPE_ENUM:
            return dice.choice((0, 1, 2, 3, 99))
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return dice.choice((0.0, -1.0, 0.5, 1e30, float("inf"), float("nan")))
    bits = 31 if field.cpp_type in _SMALL else 63
    top = 2**bits - 1
    if field.cpp_type in _UNSIGNED:
        return dice.choice((0, 1, 7, 2 * top + 1))
    return dice.choice((0, 1, 7, -1, top, -top - 1))


_SMALL = (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_UINT32)
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
