"""Clients of a router's gRPC API: ``Client`` for threads, ``AsyncClient`` for asyncio.

``_Requests`` builds the requests of both. They differ only in how they wait.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import aclosing, closing
from typing import Generic, Self, TypeVar

import grpc
import grpc.aio

from baton.client import grpc_wire as wire
from baton.client.values import Answer, Message, ModelCard, Piece, Sampling
from baton.rpc.grpc_channel import open_blocking_channel, open_channel
from baton.security.tls import TlsFiles
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub
from baton.v1.sampling_pb2 import SamplingParameters
from baton.v1.tools_pb2 import Tools

DEFAULT_ADDRESS = "127.0.0.1:8001"
DEADLINE_S = 300.0
"""Default time limit of a request, in seconds."""
MODELS_DEADLINE_S = 5.0

Pieces = TypeVar("Pieces")
Responses = TypeVar("Responses")


class _Requests(ABC, Generic[Pieces, Responses]):
    """Builds requests. A subclass sends them and streams ``Responses``, or ``Pieces`` of text."""

    def __init__(self, address: str, api_key: str, model: str) -> None:
        self._model = model
        self._address = address
        self._metadata = wire.metadata(api_key)

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Pieces:
        """Continue a conversation, piece by piece. Closing the generator aborts the request."""
        return self._pieces(
            self.generate(
                messages=wire.chat_messages(messages),
                sampling=wire.sampling_message(sampling),
                deadline_s=deadline_s,
            )
        )

    def stream_completion(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Pieces:
        """Continue a text or token ids, piece by piece.

        Closing the generator aborts the request.
        """
        return self._pieces(
            self.generate(
                **wire.prompt_input(prompt),
                sampling=wire.sampling_message(sampling),
                deadline_s=deadline_s,
            )
        )

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
    ) -> Responses:
        """Stream the protocol's messages of ``n`` answers to a text, token ids or a conversation.

        Give exactly one of ``prompt``, ``token_ids`` and ``messages``; otherwise ValueError is
        raised. Each message in the stream names its choice. ``tools`` are only used with
        ``messages``. Closing the generator aborts the request.
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

    @abstractmethod
    def _stream(self, request: pb.GenerateRequest, deadline_s: float) -> Responses:
        """Send a request, and return the stream of its responses. Iterating over the stream raises
        BatonError if the call fails."""

    @abstractmethod
    def _pieces(self, responses: Responses) -> Pieces:
        """Convert a stream of the protocol's messages to pieces of text."""


class Client(_Requests[Generator[Piece, None, None], Generator[pb.GenerateResponse, None, None]]):
    """A client of a router's gRPC API, for threads. It connects on first use, and threads can share
    it. Its methods raise BatonError."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        api_key: str = "",
        *,
        model: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        """Create a client. ``address`` is the host:port of a router's gRPC listener.

        ``model`` may be empty where one model is served. ``tls`` names the CA of the router's
        certificate, and the client's own certificate; None disables TLS. Raises ConfigError if a
        file of ``tls`` cannot be used.
        """
        super().__init__(address, api_key, model)
        self._channel = open_blocking_channel(address, tls)
        self._stub = InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Abort requests in flight, and close the connection."""
        self._channel.close()

    def models(self, *, deadline_s: float = MODELS_DEADLINE_S) -> tuple[ModelCard, ...]:
        """Return the models that are served. Raises Unavailable without a router."""
        request = pb.ListModelsRequest()
        try:
            found = self._stub.ListModels(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.meant(error, self._address) from error
        return wire.models(found)

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        """Continue a conversation, and return the complete answer."""
        return Answer.of(self.stream_chat(messages, sampling, deadline_s=deadline_s))

    def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        """Continue a text or token ids, and return the complete answer."""
        return Answer.of(self.stream_completion(prompt, sampling, deadline_s=deadline_s))

    def _stream(
        self, request: pb.GenerateRequest, deadline_s: float
    ) -> Generator[pb.GenerateResponse, None, None]:
        call = self._stub.Generate(request, timeout=deadline_s, metadata=self._metadata)
        try:
            yield from call
        except grpc.RpcError as error:
            raise wire.meant(error, self._address) from error
        finally:
            call.cancel()

    def _pieces(
        self, responses: Generator[pb.GenerateResponse, None, None]
    ) -> Generator[Piece, None, None]:
        with closing(responses):
            for response in responses:
                yield wire.piece(response)


class AsyncClient(
    _Requests[AsyncGenerator[Piece, None], AsyncGenerator[pb.GenerateResponse, None]]
):
    """A client with the methods of ``Client``, for asyncio. It connects on first use, and belongs
    to one event loop."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        api_key: str = "",
        *,
        model: str = "",
        tls: TlsFiles | None = None,
    ) -> None:
        """Create a client. The arguments are those of ``Client``.

        Raises ConfigError if a file of ``tls`` cannot be used.
        """
        super().__init__(address, api_key, model)
        self._channel = open_channel(address, tls)
        self._stub = InferenceServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Abort requests in flight, and close the connection."""
        await self._channel.close()

    async def models(self, *, deadline_s: float = MODELS_DEADLINE_S) -> tuple[ModelCard, ...]:
        """Return the models that are served. Raises Unavailable without a router."""
        request = pb.ListModelsRequest()
        try:
            found = await self._stub.ListModels(
                request, timeout=deadline_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise wire.meant(error, self._address) from error
        return wire.models(found)

    async def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        """Continue a conversation, and return the complete answer."""
        pieces = self.stream_chat(messages, sampling, deadline_s=deadline_s)
        return Answer.of([piece async for piece in pieces])

    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        """Continue a text or token ids, and return the complete answer."""
        pieces = self.stream_completion(prompt, sampling, deadline_s=deadline_s)
        return Answer.of([piece async for piece in pieces])

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
        self, responses: AsyncGenerator[pb.GenerateResponse, None]
    ) -> AsyncGenerator[Piece, None]:
        async with aclosing(responses):
            async for response in responses:
                yield wire.piece(response)
