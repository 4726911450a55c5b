"""The first steps of every call of the gRPC listener: metadata, message, bounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import grpc.aio
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError, Message

from baton.client.headers import REQUEST_ID_HEADER, is_request_id
from baton.config.cluster import Config
from baton.errors import DeadlineExceeded, InvalidRequest, RequestTooLarge
from baton.liveness.listening import listening
from router.access.api_keys import Caller
from router.inference.builder import Arrival

SMALL_BYTES = 256 << 10
"""Maximum size of a small message, in bytes. It is parsed in a few milliseconds, whatever it
contains."""
MAX_FIELDS = 12_288
"""Maximum number of fields in a message that is larger than ``SMALL_BYTES``. A conversation of 2048
messages has some 6,000 fields."""
Context = grpc.aio.ServicerContext[Any, Any]


class Service(Protocol):
    """A gRPC service that can be added to the router's gRPC server."""

    def add_to(self, server: grpc.aio.Server) -> str:
        """Add the service to a server that is not started yet. Return the service's full name."""


def metadata_of(context: Context) -> dict[str, str]:
    """Return the text metadata of a call, by name. gRPC's names are in lower case."""
    pairs = context.invocation_metadata() or ()
    return {name: value for name, value in pairs if isinstance(value, str)}


def request_id_of(metadata: Mapping[str, str]) -> str:
    """Return the id that the client gave a call, or no text if there is no valid one."""
    given = metadata.get(REQUEST_ID_HEADER, "")
    return given if is_request_id(given) else ""


def arrival_of(
    context: Context,
    metadata: Mapping[str, str],
    caller: Caller,
    name: str,
    at: float,
    config: Config,
) -> Arrival:
    """Build the ``Arrival`` of a gRPC call. If the call has a deadline of its own, this deadline
    applies to the request, too.

    ``name``: the id that the router gives the request. Raises InvalidRequest."""
    left, max_s = context.time_remaining(), config.request_deadline_s
    if left is None or left >= max_s:
        return Arrival.of(name, at, metadata, max_s, caller)
    return Arrival.of(name, at, metadata, left, caller, own_deadline=True)


async def message_of(context: Context, parse: Callable[[bytes], Message]) -> Any:
    """Read and parse the one message that a client sends in a call. Raises InvalidRequest.

    ``parse`` is ``FromString`` of the message's class. The call's handler must be registered
    without a deserializer, so that it gets bytes."""
    raw = await context.read()
    if raw is grpc.aio.EOF:
        raise InvalidRequest("the call has no message")
    try:
        if len(raw) > SMALL_BYTES:
            kind: Any = parse
            check_fields(raw, kind.__self__.DESCRIPTOR)
        return parse(raw)
    except DecodeError:
        raise InvalidRequest("the message cannot be parsed") from None


def check_fields(raw: bytes, descriptor: Descriptor) -> None:
    """Check the number of fields in a message, including nested ones, before it is parsed.

    Raises InvalidRequest that names the limit, and DecodeError if the bytes are not a message of
    this type."""
    left = MAX_FIELDS
    parts = [(0, len(raw), _within(descriptor))]
    while parts:
        at, end, within = parts.pop()
        while at < end:
            left -= 1
            if left < 0:
                raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields")
            tag, at = _varint(raw, at)
            match tag & 7:
                case 0:
                    _, at = _varint(raw, at)
                case 1:
                    at += 8
                case 2:
                    size, at = _varint(raw, at)
                    kind = within.get(tag >> 3)
                    if kind is not None:
                        parts.append((at, min(end, at + size), _within(kind)))
                    at += size
                case 5:
                    at += 4
                case _:
                    raise DecodeError("groups are not in use")


@functools.cache
def _within(descriptor: Descriptor) -> Mapping[int, Descriptor]:
    """Return the descriptors of a message's nested messages, by field number."""
    kinds = ((field.number, field.message_type) for field in descriptor.fields)
    return {number: kind for number, kind in kinds if kind is not None}


def _varint(raw: bytes, at: int) -> tuple[int, int]:
    """Read the varint at position ``at``. Return the number and the position after it."""
    if at < len(raw) and raw[at] < 128:
        return raw[at], at + 1
    value = shift = 0
    for place in range(at, min(len(raw), at + 10)):
        value |= (raw[place] & 127) << shift
        if raw[place] < 128:
            return value, place + 1
        shift += 7
    raise DecodeError("a number does not end")


def message_is_late() -> DeadlineExceeded:
    """Build the error of a call whose message did not arrive in time."""
    return DeadlineExceeded("the call's message did not arrive in time")


async def write_to(context: Context, message: Message, config: Config) -> None:
    """Write a message to a call's client. Return once the connection has room again.

    Raises DeadlineExceeded if the connection has no room for ``slow_client_s`` seconds."""
    try:
        async with listening(config.advanced.slow_client_s) as timeout:
            await context.write(message)
    except TimeoutError:
        if not timeout.expired():
            raise
        raise DeadlineExceeded("the client has not read its answer") from None


def check_size(request: Message, config: Config) -> None:
    """Check that a message does not exceed the maximum size of an HTTP body. Raises
    RequestTooLarge.
    """
    if request.ByteSize() > config.max_body_bytes:
        raise RequestTooLarge(f"the message is larger than {config.max_body_bytes} bytes")
