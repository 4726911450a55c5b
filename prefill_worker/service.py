"""The gRPC face of the prefill role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc.aio

from baton import convert
from baton.grpc_errors import grpc_boundary
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from kvtransfer.transport import Peer
from prefill_worker.fetch import PrefixSource

if TYPE_CHECKING:
    from prefill_worker.role import PrefillRole


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Turns messages into calls of the role. Runs on the control loop."""

    def __init__(self, role: PrefillRole) -> None:
        self._role = role

    async def Prefill(  # noqa: N802 - gRPC's name
        self,
        request: prefill_pb2.PrefillRequest,
        context: grpc.aio.ServicerContext[object, object],
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        """See prefill.proto."""
        spec = convert.sequence_from_proto(request.sequence)
        async with (
            grpc_boundary(context),
            aclosing(
                self._role.prefill(
                    spec, request.decode_address, request.decode_incarnation, _source(request)
                )
            ) as responses,
        ):
            async for response in responses:
                yield response


def _source(request: prefill_pb2.PrefillRequest) -> PrefixSource | None:
    if not request.HasField("source"):
        return None
    source = request.source
    return PrefixSource(Peer(source.incarnation, source.address), source.blocks)
