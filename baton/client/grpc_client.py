"""A client of a router's gRPC front, for programs without an event loop."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Self

import grpc

from baton.client import grpc_wire as wire
from baton.client.values import Answer, Message, ModelInfo, Piece, Sampling
from baton.rpc.grpc_channel import open_blocking_channel
from baton.security.tls import TlsFiles
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import InferenceServiceStub
from baton.v1.sampling_pb2 import SamplingParameters
from baton.v1.tools_pb2 import Tools

DEFAULT_ADDRESS = "127.0.0.1:8001"
DEADLINE_S = 300.0
"""Of an answer."""
MODELS_DEADLINE_S = 5.0


class Client:
    """Connects on first use. Safe to share between threads. Its methods raise BatonError."""

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
        self._channel = open_blocking_channel(address, tls)
        self._address = address
        self._metadata = wire.metadata(api_key)
        self._stub = InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way, and the connection."""
        self._channel.close()

    def models(self, *, deadline_s: float = MODELS_DEADLINE_S) -> tuple[ModelInfo, ...]:
        """The models that are served; Unavailable when nothing listens."""
        return wire.models(self._list(deadline_s))

    def chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        """Continue a conversation."""
        return Answer.of(self.stream_chat(messages, sampling, deadline_s=deadline_s))

    def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Answer:
        """Continue a text, or token ids."""
        return Answer.of(self.stream_completion(prompt, sampling, deadline_s=deadline_s))

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling: Sampling | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Generator[Piece, None, None]:
        """As ``chat``, while it is made. Closing the iterator aborts the request."""
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
    ) -> Generator[Piece, None, None]:
        """As ``complete``, while it is made. Closing the iterator aborts the request."""
        answer = self.generate(
            **wire.prompt_input(prompt),
            sampling=wire.sampling_message(sampling),
            deadline_s=deadline_s,
        )
        return _pieces(answer)

    # Messages of the protocol, as they are

    def list_models(self, *, deadline_s: float = MODELS_DEADLINE_S) -> tuple[pb.Model, ...]:
        """The models that are served; Unavailable when nothing listens."""
        return tuple(self._list(deadline_s).models)

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
    ) -> Generator[pb.GenerateResponse, None, None]:
        """Stream ``n`` answers to a text, to token ids or to a conversation: give one of them.

        Each message names its choice. ``tools`` go with ``messages``. Closing the iterator
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

    def _list(self, deadline_s: float) -> pb.ListModelsResponse:
        request = pb.ListModelsRequest()
        try:
            return self._stub.ListModels(request, timeout=deadline_s, metadata=self._metadata)
        except grpc.RpcError as error:
            raise wire.meant(error, self._address) from error

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


def _pieces(answer: Generator[pb.GenerateResponse, None, None]) -> Generator[Piece, None, None]:
    with closing(answer):
        for response in answer:
            yield wire.piece(response)
