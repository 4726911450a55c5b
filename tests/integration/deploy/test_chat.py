from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from baton.client import Client
from baton.errors import InvalidRequest, Overloaded, Unavailable
from baton.grpc_errors import CODE_KEY, RETRY_KEY
from baton.v1 import inference_pb2 as pb
from baton.v1.inference_pb2_grpc import (
    InferenceServiceServicer,
    add_InferenceServiceServicer_to_server,
)
from baton.v1.sampling_pb2 import SamplingParameters
from deploy.chat import Chat
from deploy.ports import free_port

DEADLINE_S = 60.0


class Parrot(InferenceServiceServicer):
    """Repeats the last message word by word; some words have an effect."""

    def __init__(self) -> None:
        self.requests: list[pb.GenerateRequest] = []
        self.cancelled = threading.Event()

    def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.GenerateResponse]:
        self.requests.append(request)
        context.add_callback(self.cancelled.set)
        if request.WhichOneof("input") != "messages":
            context.set_trailing_metadata(((CODE_KEY, "invalid_value"),))
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "parrots need messages")
        for word in request.messages.messages[-1].content.split():
            if word == "full":
                trailers = ((CODE_KEY, "overloaded"), (RETRY_KEY, "1500"))
                context.set_trailing_metadata(trailers)
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "queues are full")
            if word == "wait":
                self.cancelled.wait(DEADLINE_S)
                return
            yield pb.GenerateResponse(text=f"{word} ")

    def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, context: grpc.ServicerContext
    ) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.Model(id="parrot", context_length=8)])


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


@pytest.fixture
def client(parrot: Parrot) -> Iterator[Client]:
    server = grpc.server(ThreadPoolExecutor(4))
    add_InferenceServiceServicer_to_server(parrot, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with Client(f"127.0.0.1:{port}") as client:
        yield client
    server.stop(0).wait(DEADLINE_S)


def messages(request: pb.GenerateRequest) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in request.messages.messages]


def test_the_conversation_grows_and_the_sampling_travels(client: Client, parrot: Parrot) -> None:
    shown: list[str] = []
    chat = Chat(client, SamplingParameters(max_tokens=7, seed=3), shown.append)
    assert chat.ask("one two")
    assert "".join(shown) == "one two \n"
    assert chat.ask("three")
    expected = [("user", "one two"), ("assistant", "one two "), ("user", "three")]
    assert messages(parrot.requests[1]) == expected
    assert parrot.requests[1].sampling == SamplingParameters(max_tokens=7, seed=3)


def test_ctrl_c_ends_the_answer_alone_and_aborts_the_request(
    client: Client, parrot: Parrot
) -> None:
    def interrupt(text: str) -> None:
        if text == "go ":
            raise KeyboardInterrupt

    chat = Chat(client, SamplingParameters(), interrupt)
    assert not chat.ask("go wait")
    assert parrot.cancelled.wait(DEADLINE_S)
    assert chat.ask("again")
    assert messages(parrot.requests[1])[1] == ("assistant", "go ")


def test_a_question_that_failed_is_not_part_of_the_conversation(
    client: Client, parrot: Parrot
) -> None:
    chat = Chat(client, SamplingParameters(), lambda _: None)
    with pytest.raises(Overloaded, match="queues are full") as failure:
        chat.ask("full")
    assert failure.value.retry_after == 1.5
    assert chat.ask("hello")
    assert messages(parrot.requests[1]) == [("user", "hello")]


def test_models_are_listed(client: Client) -> None:
    assert [model.id for model in client.list_models()] == ["parrot"]


def test_one_input_is_needed(client: Client) -> None:
    with pytest.raises(ValueError, match="one of prompt, token_ids and messages"):
        client.generate()
    with pytest.raises(ValueError, match="one of prompt, token_ids and messages"):
        client.generate(prompt="a", token_ids=[1])


def test_nobody_there_is_unavailable() -> None:
    address = f"127.0.0.1:{free_port()}"
    with Client(address) as client, pytest.raises(Unavailable, match=address):
        client.list_models(deadline_s=DEADLINE_S)


def test_errors_of_the_router_keep_their_meaning(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="parrots need messages"):
        list(client.generate(prompt="x"))
