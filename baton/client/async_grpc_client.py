"""A client of a router's gRPC front, for asyncio."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Self

import grpc.aio

from baton.client import grpc_wire as wire
from baton.client.grpc_client import DEADLINE_S, DEFAULT_ADDRESS, MODELS_DEADLINE_S
from baton.client.values import Answer, Message, ModelInfo, Piece, Sampling
from baton.rpc.grpc_channel import open_channel
from baton.security.tls import TlsFiles
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub
from baton.v1.sampling_pb2 import SamplingParameters
from baton.v1.tools_pb2 import Tools


class AsyncClient:
    """As ``Client``. Connects on first use; belongs to one event loop, on which it is made."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        api_key: str = "",
        *,
        model: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        """``address`` is the host:port of a router's gRPC front. ``model`` may be empty where one

        model is served. ``tls``: whom the front must be vouched for by, and what it is shown; None
        has no TLS. Raises ConfigError where its files cannot be used.
        """
        self._model = model
        self._channel = open_channel(address, tls)
        self._address = address
        self._metadata = wire.metadata(api_key)
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
        answer = self.generate(
            messages=wire.chat_messages(messages),
            sampling=wire.sampling_message(sampling),
            deadline_s=deadline_s,
        )
        return _pieces(answer)

    def stream_completion(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> AsyncGenerator[Piece, None]:
        """As ``complete``, while it is made. Closing the generator aborts the request."""
        answer = self.generate(
            **wire.prompt_input(prompt),
            sampling=wire.sampling_message(sampling),
            deadline_s=deadline_s,
        )
        return _pieces(answer)

    # Messages of the protocol, as they are

    def generate(
        self,
        *,
        prompt: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[pb.ChatMessage] | None = None,
        model: str = "",
        sampling: SamplingParameters | None = None,
        n: int = 1,
        tools: Tools | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Stream ``n`` answers to a text, to token ids or to a conversation: give one of them.

        Each message names its choice. ``tools`` go with ``messages``. Closing the generator
        aborts the request. Raises ValueError when there is not one input.
        """
        request = wire.generate_request(
            model=model or self._model,
            prompt=prompt,
            token_ids=token_ids,
            messages=messages,
            sampling=sampling,
            n=n,
            tools=tools,
        )
        return self._stream(request, deadline_s)

    async def _stream(
        self, request: pb.GenerateRequest, deadline_s: float
    ) -> AsyncGenerator[pb.GenerateResponse, None]:
        call = self._stub.Generate(request, timeout=deadline_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise wire.meant(error, self._address) from error
        finally:
            call.cancel()


async def _pieces(
    answer: AsyncGenerator[pb.GenerateResponse, None],
) -> AsyncGenerator[Piece, None]:
    async with aclosing(answer):
        async for response in answer:
            yield wire.piece(response)
