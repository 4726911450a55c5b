"""The gRPC face of whatever computes prompts, whichever role it plays."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import grpc.aio

from baton.grpc_errors import grpc_boundary
from baton.v1 import prefill_pb2, prefill_pb2_grpc

Runner = Callable[[prefill_pb2.PrefillRequest], AsyncGenerator[prefill_pb2.PrefillResponse, None]]
"""Computes a prompt, and says what comes of it. Raises BatonError; closing it aborts."""


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Turns messages into calls of a runner. Runs on the control loop."""

    def __init__(self, run: Runner) -> None:
        self._run = run

    async def Prefill(  # noqa: N802 - gRPC's name
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """See prefill.proto."""
        async with grpc_boundary(context), aclosing(self._run(request)) as responses:
            async for response in responses:
                yield response
