"""grpc.health.v1 of a router: the same answer as /health."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from router.core.request import Dispatcher

_WATCH_PERIOD_S = 0.5
"""How late a watcher learns of a change, at most."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Serves the whole server ("") and each of ``services``."""

    def __init__(self, dispatcher: Dispatcher, services: tuple[str, ...]) -> None:
        self._dispatcher = dispatcher
        self._services = frozenset(("", *services))

    async def Check(  # noqa: N802 - the service's own name
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> health_pb2.HealthCheckResponse:
        """NOT_FOUND for a service that is not here."""
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=self._status(request.service))

    async def Watch(  # noqa: N802
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now, then each change."""
        last = None
        while True:
            status = self._status(request.service)
            if status != last:
                last = status
                yield health_pb2.HealthCheckResponse(status=status)
            await asyncio.sleep(_WATCH_PERIOD_S)

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        if service not in self._services:
            return health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        down = self._dispatcher.health()[0] == "down"
        if down:
            return health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse.SERVING
