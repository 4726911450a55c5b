"""baton.v1.EmbeddingService."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable

import grpc.aio

from baton.config import Config
from baton.errors import InvalidRequest
from baton.grpc_errors import guarded
from baton.v1 import embeddings_pb2, embeddings_pb2_grpc, inference_pb2
from router.embeddings.desk import EmbeddingDesk
from router.exchange import Exchange
from router.grpc_call import Context, arrival_of, check_size, metadata_of
from router.off_loop import off_loop
from router.request_builder import Prompt


class EmbeddingServicer(embeddings_pb2_grpc.EmbeddingServiceServicer):
    """See embeddings.proto."""

    def __init__(self, exchange: Exchange, desk: EmbeddingDesk, config: Config) -> None:
        self._exchange = exchange
        self._desk = desk
        self._config = config

    def add_to(self, server: grpc.aio.Server) -> str:
        """See ``router.grpc_call.Service``."""
        embeddings_pb2_grpc.add_EmbeddingServiceServicer_to_server(self, server)
        return embeddings_pb2.DESCRIPTOR.services_by_name["EmbeddingService"].full_name

    @guarded
    async def Embed(  # noqa: N802 - gRPC's name
        self, request: embeddings_pb2.EmbedRequest, context: Context
    ) -> embeddings_pb2.EmbedResponse:
        """Embed one or more texts."""
        received_at = time.monotonic()
        async with self._exchange.counting_refusals():
            metadata = metadata_of(context)
            caller = self._exchange.caller(metadata)
            check_size(request, self._config)
            if request.model:
                self._desk.check_model(request.model)
            name = f"embd-{secrets.token_hex(16)}"
            arrival = arrival_of(context, metadata, caller, name, received_at, self._config)
            dimensions = request.dimensions if request.HasField("dimensions") else None
            asked = await self._desk.asked(arrival, _inputs(request.inputs), dimensions)
        found = await self._desk.embed(asked, arrival)
        if found.headers:
            await context.send_initial_metadata(tuple(found.headers.items()))
        vectors = await off_loop(
            sum(map(len, found.vectors)),
            lambda: [embeddings_pb2.Embedding(values=v.tolist()) for v in found.vectors],
        )
        usage = inference_pb2.Usage(
            prompt_tokens=found.prompt_tokens, cached_prompt_tokens=found.cached_tokens
        )
        return embeddings_pb2.EmbedResponse(embeddings=vectors, usage=usage)


def _inputs(given: Iterable[embeddings_pb2.EmbeddingInput]) -> list[Prompt]:
    return [_input(one) for one in given]


def _input(given: embeddings_pb2.EmbeddingInput) -> Prompt:
    kind = given.WhichOneof("input")
    if kind is None:
        raise InvalidRequest("one of text and token_ids is required", param="inputs")
    return given.text if kind == "text" else tuple(given.token_ids.ids)
