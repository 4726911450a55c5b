"""The decode role of a worker: its gRPC services, heartbeat and end."""

from __future__ import annotations

import time

import grpc.aio

from baton.v1 import decode_pb2_grpc, prefill_pb2_grpc
from decode_worker.requests import DecodeRequests
from decode_worker.service import DecodeServicer
from worker.prefill.fetch_estimates import FetchEstimates
from worker.prefill.service import PrefillServicer
from worker.role import WorkerContext


class DecodeRole(DecodeRequests):
    """The decode role of a worker. Implements ``worker.role.Role``. Owned by the worker's event
    loop."""

    def __init__(self, context: WorkerContext, estimates: FetchEstimates | None = None) -> None:
        """Make the role. ``estimates`` are those of ``DecodeRequests``."""
        super().__init__(context, estimates)
        self._prefills = PrefillServicer(self.flow.run, context.core.load, self.keepalive)

    def mount(self, server: grpc.aio.Server) -> None:
        """Add DecodeService, and PrefillService for prompts that are computed here, to the
        server."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(self), server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._prefills, server)

    async def heartbeat(self) -> None:
        """End sequences, tickets and cached blocks that have expired. Raises WorkerFailed if the
        engine hangs."""
        now = time.monotonic()
        self.expire(now)
        self.hand_back()
        self.sequences.flush()
        self.context.core.beat(now)
        if not self.context.intake.is_open:
            self.receiver.turns.clear()
        # Workers that read cached blocks unpin them without a notice.
        self.grant_soon()

    async def close(self) -> None:
        """End every sequence and ticket, then the streams to routers and writers."""
        self.end_all()
        self._prefills.close()
