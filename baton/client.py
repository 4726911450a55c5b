"""A small client of a router's gRPC front, for programs without an event loop. No torch.

with Client("127.0.0.1:8001") as client:
    for piece in client.generate(prompt="Once upon a time"):
        print(piece.text, end="")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Self, cast

import grpc

from baton.errors import BatonError, Unavailable
from baton.grpc_channel import open_blocking_channel
from baton.grpc_errors import CODE_KEY, error_from_rpc
from baton.v1.inference_pb2 import (
    ChatMessage,
    ChatMessages,
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    Model,
    TokenIds,
)
from baton.v1.inference_pb2_grpc import InferenceServiceStub
from baton.v1.sampling_pb2 import SamplingParameters

DEFAULT_ADDRESS = "127.0.0.1:8001"


class Client:
    """Connects on first use. Safe to share between threads."""

    def __init__(self, address: str = DEFAULT_ADDRESS) -> None:
        """``address`` is the host:port of a router's gRPC front."""
        self._address = address
        self._channel = open_blocking_channel(address)
        self._stub = InferenceServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is under way, and the connection."""
        self._channel.close()

    def list_models(self, *, deadline_s: float = 5.0) -> tuple[Model, ...]:
        """The models that are served. Raises BatonError; Unavailable when nothing listens."""
        try:
            answer = self._stub.ListModels(ListModelsRequest(), timeout=deadline_s)
        except grpc.RpcError as error:
            raise self._meant(error) from error
        return tuple(answer.models)

    def generate(
        self,
        *,
        prompt: str | None = None,
        token_ids: Sequence[int] | None = None,
        messages: Sequence[ChatMessage] | None = None,
        model: str = "",
        sampling: SamplingParameters | None = None,
        n: int = 1,
        deadline_s: float = 300.0,
    ) -> Iterator[GenerateResponse]:
        """Stream an answer to a text, to token ids or to a conversation: give one of them.

        ``n`` answers are drawn side by side; each message is about one of them. ``model`` may be
        empty where one model is served. Closing the iterator aborts the request.
        Raises BatonError when the request fails, ValueError when there is not one input.
        """
        if sum(given is not None for given in (prompt, token_ids, messages)) != 1:
            raise ValueError("give one of prompt, token_ids and messages")
        request = GenerateRequest(model=model, sampling=sampling, n=n)
        if prompt is not None:
            request.prompt = prompt
        elif token_ids is not None:
            request.token_ids.CopyFrom(TokenIds(ids=token_ids))
        else:
            request.messages.CopyFrom(ChatMessages(messages=messages))
        return self._stream(request, deadline_s)

    def _stream(self, request: GenerateRequest, deadline_s: float) -> Iterator[GenerateResponse]:
        call = self._stub.Generate(request, timeout=deadline_s)
        try:
            yield from call
        except grpc.RpcError as error:
            raise self._meant(error) from error
        finally:
            call.cancel()

    def _meant(self, error: grpc.RpcError) -> BatonError:
        # What the blocking API raises is also the call, with the same methods as the asyncio one.
        rpc = cast(Any, error)
        from_router = CODE_KEY in dict(rpc.trailing_metadata() or ())
        if rpc.code() is grpc.StatusCode.UNAVAILABLE and not from_router:
            return Unavailable(f"no router answers at {self._address} ({rpc.details()})")
        return error_from_rpc(rpc, self._address)
