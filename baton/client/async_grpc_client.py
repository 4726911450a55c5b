"""A client of a router's gRPC front, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Self

import grpc.aio

from baton.client import grpc_wire as wire
from baton.client.grpc_client import DEADLINE_S, DEFAULT_ADDRESS, MODELS_DEADLINE_S
from baton.client.values import Answer, Message, ModelInfo, Piece, Sampling
from baton.grpc_channel import open_channel
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub


class AsyncClient:
    """As ``Client``. Connects on first use; belongs to one event loop, on which it is made."""

    def __init__(
        self, address: str = DEFAULT_ADDRESS, api_key: str = "", *, model: str = ""
    ) -> None:
        """``address`` is the host:port of a router's gRPC front. ``model`` may be empty where one

        model is served.
        """
        self._address = address
        self._model = model
        self._metadata = wire.metadata(api_key)
        self._channel = open_channel(address)
        self._stub = InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End what is under way, and the connection."""
        await self._channel.close()

    async def models(self, *, deadline_s: float = MODELS_DEADLINE_S) -> tuple[ModelInfo, ...]:
        """The models that are served; Unavailable when nothing listens."""
        request = pb.ListModelsRequest()
        try:
            answer = await self._stub.ListModels(
                request, timeout=deadline_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise wire.meant(error, self._address) from error
        return wire.models(answer)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        """Continue a conversation."""
        pieces = self.stream_chat(messages, sampling, deadline_s=deadline_s)
        return Answer.of([piece async for piece in pieces])

    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        """Continue a text, or token ids."""
        pieces = self.stream_completion(prompt, sampling, deadline_s=deadline_s)
        return Answer.of([piece async for piece in pieces])

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> AsyncGenerator[Piece, None]:
        """As ``chat``, while it is made. Closing the generator aborts the request."""
        request = wire.generate_request(
            model=self._model,
            messages=wire.chat_messages(messages),
            prompt=None,
            token_ids=None,
            sampling=wire.sampling_message(sampling),
        )
        return self._pieces(request, deadline_s)

    def stream_completion(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> AsyncGenerator[Piece, None]:
        """As ``complete``, while it is made. Closing the generator aborts the request."""
        request = wire.generate_request(
            model=self._model,
            messages=None,
            prompt=prompt if isinstance(prompt, str) else None,
            token_ids=None if isinstance(prompt, str) else prompt,
            sampling=wire.sampling_message(sampling),
        )
        return self._pieces(request, deadline_s)

    async def _pieces(
        self, request: pb.GenerateRequest, deadline_s: float
    ) -> AsyncGenerator[Piece, None]:
        call = self._stub.Generate(request, timeout=deadline_s, metadata=self._metadata)
        try:
            async for response in call:
                yield wire.piece(response)
        except grpc.aio.AioRpcError as error:
            raise wire.meant(error, self._address) from error
        finally:
            call.cancel()
