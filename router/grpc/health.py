"""The health service of a router, grpc.health.v1: the same answer as /health.

A call needs no key. So it takes a place (``router.access.places``) before its message is read. A
watcher keeps its place until another call needs it.

    called ─a place→ asked within ``ASK_S`` ─Check→ answered
    asked ─Watch→ watching: each change is sent
    called, watching ─all places are taken, and this one has waited longest→ RESOURCE_EXHAUSTED
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2  # type: ignore[import-untyped]

from baton.config.cluster import Config
from baton.errors import BatonError, NotFound, Overloaded
from baton.host.background import spawn
from baton.rpc.grpc_errors import grpc_boundary
from router.access.places import Place, Places
from router.core.request import Dispatcher
from router.grpc.call import Context, message_is_late, message_of, write_to

NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
MAX_CALLS = 1024
MAX_CALLS_OF_A_CONNECTION = 16
ASK_S = 5.0
"""Seconds that a client of the health service has to send its small message."""
RETRY_S = 1.0
POLL_S = 0.5
"""Maximum delay in seconds until watchers receive a change of the health."""


class HealthServicer:
    """The gRPC health service: reports the health of the whole server ("") and of each of
    ``services``.
    """

    def __init__(self, dispatcher: Dispatcher, services: tuple[str, ...], config: Config) -> None:
        self._dispatcher = dispatcher
        self._services = frozenset(("", *services))
        self._config = config
        self._places = Places(MAX_CALLS, MAX_CALLS_OF_A_CONNECTION, ASK_S)
        self._watchers = 0
        self._poller: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    def add_to(self, server: grpc.aio.Server) -> str:
        """Add the health service to a server. Return the service's name.

        The methods take streams, since gRPC reads the messages of a stream only when the handler
        asks for them."""
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            name: grpc.stream_stream_rpc_method_handler(
                method,
                response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
            )
            for name, method in (("Check", self._check), ("Watch", self._watch))
        }
        server.add_registered_method_handlers(NAME, handlers)
        return str(NAME)

    async def _check(self, _: AsyncIterator[Any], context: Context) -> None:
        """Send the current health status once. The status is NOT_FOUND for an unknown service."""
        async with grpc_boundary(context), self._place(context) as place:
            service = await self._asked(context)
            place.work()
            if service not in self._services:
                raise NotFound("there is no such service")
            await self._send(context, self._status(service))

    async def _watch(self, _: AsyncIterator[Any], context: Context) -> None:
        """Send the current health status, then each change."""
        async with grpc_boundary(context), self._place(context) as place:
            service = await self._asked(context)
            place.wait(math.inf, place.cut)
            async with self._polled():
                last = None
                while True:
                    changed = self._changed
                    status = self._status(service)
                    if status != last:
                        last = status
                        await self._send(context, status)
                    await changed.wait()

    async def _asked(self, context: Context) -> str:
        message = await message_of(context, health_pb2.HealthCheckRequest.FromString)
        return str(message.service)

    @asynccontextmanager
    async def _place(self, context: Context) -> AsyncIterator[Place]:
        """Hold a ``Place`` during the block, which limits the number of calls. Raises Overloaded if
        no place is free, and DeadlineExceeded if the client sends too late."""
        loop = asyncio.get_running_loop()
        error: BatonError = Overloaded("too many health calls are open", retry_after=RETRY_S)
        try:
            async with asyncio.timeout(None) as timeout:

                def cut() -> None:
                    timeout.reschedule(loop.time())

                def end_late() -> None:
                    nonlocal error
                    error = message_is_late()
                    cut()

                place = self._places.admit(context.peer(), cut)
                if place is None:
                    raise Overloaded(
                        f"a connection has at most {MAX_CALLS_OF_A_CONNECTION} health calls",
                        retry_after=RETRY_S,
                    )
                place.wait(ASK_S, end_late)
                try:
                    yield place
                finally:
                    place.release()
        except TimeoutError:
            if not timeout.expired():
                raise
            raise error from None

    @asynccontextmanager
    async def _polled(self) -> AsyncIterator[None]:
        """Poll for changes of the health during the block. One task serves all watchers: it sets
        ``_changed`` when the health changes."""
        self._watchers += 1
        if self._poller is None:
            self._poller = spawn(self._poll(), "health")
        try:
            yield
        finally:
            self._watchers -= 1
            if not self._watchers:
                self._poller.cancel()
                self._poller = None

    async def _poll(self) -> None:
        was_down = self._is_down()
        while True:
            await asyncio.sleep(POLL_S)
            if self._is_down() != was_down:
                was_down = not was_down
                changed, self._changed = self._changed, asyncio.Event()
                changed.set()

    def _is_down(self) -> bool:
        return self._dispatcher.health()[0] == "down"

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        if self._is_down():
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING

    async def _send(self, context: Context, status: Any) -> None:
        await write_to(context, health_pb2.HealthCheckResponse(status=status), self._config)
