"""What every call of the gRPC listener begins with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import grpc.aio
from google.protobuf.message import DecodeError, Message

from baton.config.cluster import Config
from baton.errors import DeadlineExceeded, InvalidRequest, RequestTooLarge
from baton.liveness.listening import listening
from router.access.api_keys import Caller
from router.inference.builder import Arrival

Context = grpc.aio.ServicerContext[Any, Any]


class Service(Protocol):
    """One gRPC service of the front."""

    def add_to(self, server: grpc.aio.Server) -> str:
        """Mount it on a server that is not started yet; gives its full name."""


def metadata_of(context: Context) -> dict[str, str]:
    """Text metadata of a call, by name; gRPC has the names in lower case."""
    pairs = context.invocation_metadata() or ()
    return {name: value for name, value in pairs if isinstance(value, str)}


def arrival_of(
    context: Context,
    metadata: Mapping[str, str],
    caller: Caller,
    name: str,
    at: float,
    config: Config,
) -> Arrival:
    """When a call came, and how long it may take: its own deadline bounds it too.

    ``name`` is the router's for the request. Raises InvalidRequest.
    """
    left, max_s = context.time_remaining(), config.request_deadline_s
    if left is None or left >= max_s:
        return Arrival.of(name, at, metadata, max_s, caller)
    return Arrival.of(name, at, metadata, left, caller, own_deadline=True)


async def message_of(context: Context) -> Any:
    """The message of a call, which is read now. Raises InvalidRequest."""
    try:
        message = await context.read()
    except DecodeError:
        raise InvalidRequest("the message cannot be parsed") from None
    if message is grpc.aio.EOF:
        raise InvalidRequest("the call has no message")
    return message


def message_is_late() -> DeadlineExceeded:
    """The error of a call whose message does not come."""
    return DeadlineExceeded("the call's message did not arrive in time")


async def write_to(context: Context, message: Message, config: Config) -> None:
    """Write a message; returns when the client's connection has room again.

    Raises DeadlineExceeded where it has none for ``slow_client_s``.
    """
    try:
        async with listening(config.advanced.slow_client_s) as timeout:
            await context.write(message)
    except TimeoutError:
        if not timeout.expired():
            raise
        raise DeadlineExceeded("the client has not read its answer") from None


def check_size(request: Message, config: Config) -> None:
    """Raises RequestTooLarge where HTTP would, too."""
    if request.ByteSize() > config.max_body_bytes:
        raise RequestTooLarge(f"the message is larger than {config.max_body_bytes} bytes")
