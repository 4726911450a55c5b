"""The gRPC face of computing prompts, whichever role does it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Protocol

import grpc.aio

from baton import convert
from baton.grpc_errors import grpc_boundary
from baton.request import SequenceSpec
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from kvtransfer.transport import Peer
from worker.fetch import PrefixSource


class Prefiller(Protocol):
    """Computes prompts."""

    def prefill(
        self, spec: SequenceSpec, address: str, incarnation: str, source: PrefixSource | None
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """See prefill.proto; ``address`` and ``incarnation`` are the decode worker's.

        Closing the iterator aborts the request. Raises BatonError.
        """


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """Turns messages into calls of a prefiller. Runs on the control loop."""

    def __init__(self, prefiller: Prefiller) -> None:
        self._prefiller = prefiller

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
                self._prefiller.prefill(
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
