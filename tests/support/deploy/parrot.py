"""A model that repeats its input, behind the real protocol."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc

from baton.rpc.grpc_channel import make_blocking_server
from baton.rpc.grpc_errors import CODE_KEY, RETRY_KEY
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)

DEADLINE_S = 60.0


class Parrot(InferenceServiceServicer):
    """Repeats the last message word by word; some words have an effect."""

    def __init__(self, max_messages: int = 100) -> None:
        """``max_messages``: more of them do not fit its context."""
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()
        self.max_messages = max_messages

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        context.add_callback(self.cancelled.set)
        if request.WhichOneof("input") != "messages":
            context.set_trailing_metadata(((CODE_KEY, "invalid_value"),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "parrots need messages")
        if len(request.messages.messages) > self.max_messages:
            context.set_trailing_metadata(((CODE_KEY, "context_length_exceeded"),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the context is full")
        said = request.messages.messages[-1].content
        tokens = 0
        for word in said.split(" "):
            if word == "full":
                trailers = ((CODE_KEY, "overloaded"), (RETRY_KEY, "1500"))
                context.set_trailing_metadata(trailers)
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queues are full")
            if word == "wait":
                self.cancelled.wait(DEADLINE_S)
                return
            tokens += 1
            yield pb.GenerateResponse(text=f"{word} ", token_ids=[tokens])
        yield pb.GenerateResponse(
            finish_reason=pb.FINISH_REASON_LENGTH if "long" in said else pb.FINISH_REASON_STOP,
            usage=pb.Usage(prompt_tokens=1, completion_tokens=tokens),
            prefill_worker="prefill-3",
            decode_worker="decode-4",
        )

    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(id="parrot", context_length=4096)])


def said(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    """The messages of a request: roles and texts."""
    return [(message.role, message.content) for message in request.messages.messages]


@contextmanager
def served(parrot: Parrot, port: int = 0) -> Iterator[str]:
    """Its address: host:port."""
    server, port = make_blocking_server(ThreadPoolExecutor(4), f"127.0.0.1:{port}")
    add_InferenceServiceServicer_to_server(parrot, server)
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(0).wait(DEADLINE_S)
