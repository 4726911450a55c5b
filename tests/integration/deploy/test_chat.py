from __future__ import annotations

from collections.abc import Iterator

import pytest

from baton.client import Client
from baton.errors import ContextLengthExceeded, InvalidRequest, Overloaded, Unavailable
from baton.v1.sampling_pb2 import SamplingParameters
from deploy.cli.client.chat import Chat, ChatReply
from deploy.processes.ports import free_port
from tests.support.deploy.parrot import DEADLINE_S, Parrot, said, served


@pytest.fixture
def parrot() -> Parrot:
    return Parrot()


@pytest.fixture
def client(parrot: Parrot) -> Iterator[Client]:
    with served(parrot) as address, Client(address) as client:
        yield client


def nothing(_: str) -> None:
    """Show nothing."""


def test_the_conversation_grows_and_the_sampling_travels(client: Client, parrot: Parrot) -> None:
    shown: list[str] = []
    chat = Chat(client, SamplingParameters(max_tokens=7, seed=3))
    assert chat.ask("one two", shown.append).text == "one two "
    assert shown == ["one ", "two "]
    chat.ask("three", nothing)
    assert said(parrot.requests[1]) == [
        ("user", "one two"),
        ("assistant", "one two "),
        ("user", "three"),
    ]
    assert parrot.requests[1].sampling == SamplingParameters(max_tokens=7, seed=3)


def test_an_answer_has_its_figures(client: Client) -> None:
    ticks = iter(range(100))
    chat = Chat(client, SamplingParameters(), clock=lambda: next(ticks) * 0.5)
    # Asked at 0, words at 0.5, 1 and 1.5, the end at 2 seconds.
    assert chat.ask("one two three", nothing).figures == (
        "3 tokens · 1.3 tokens/s · first token after 500 ms · prefill-3 → decode-4"
    )
    burst = Chat(client, SamplingParameters(), clock=lambda: 1.0)
    assert burst.ask("one two", nothing).figures.startswith("2 tokens · first token after 0 ms · ")
    local = ChatReply("", 1, prefill_worker="decode-0", decode_worker="decode-0")
    assert local.figures == "1 token · decode-0"
    assert ChatReply("", 9, reasoning_tokens=7).figures == "9 tokens · 7 of reasoning"
    assert "cut at the maximum length" in chat.ask("long", nothing).figures


def test_ctrl_c_ends_the_answer_alone_and_aborts_the_request(
    client: Client, parrot: Parrot
) -> None:
    def interrupt(text: str) -> None:
        if text == "go ":
            raise KeyboardInterrupt

    chat = Chat(client, SamplingParameters())
    answer = chat.ask("go wait", interrupt)
    assert answer.interrupted
    assert answer.figures.startswith("1 token · ")
    assert answer.figures.endswith(" · interrupted")
    assert parrot.cancelled.wait(DEADLINE_S)
    assert not chat.ask("again", nothing).interrupted
    assert said(parrot.requests[1])[1] == ("assistant", "go ")


def test_a_question_that_failed_is_not_part_of_the_conversation_and_can_be_taken_back(
    client: Client, parrot: Parrot
) -> None:
    chat = Chat(client, SamplingParameters())
    assert chat.take_back() == ""
    with pytest.raises(Overloaded, match="queues are full") as failure:
        chat.ask("full", nothing)
    assert failure.value.retry_after == 1.5
    assert chat.take_back() == "full"
    chat.ask("hello", nothing)
    assert said(parrot.requests[1]) == [("user", "hello")]


def test_a_question_that_is_taken_back_loses_its_answer(client: Client, parrot: Parrot) -> None:
    chat = Chat(client, SamplingParameters())
    chat.ask("one", nothing)
    chat.ask("two", nothing)
    chat.ask(chat.take_back(), nothing)
    assert said(parrot.requests[2]) == said(parrot.requests[1])


def test_a_new_conversation_keeps_the_system_prompt(client: Client, parrot: Parrot) -> None:
    chat = Chat(client, SamplingParameters())
    chat.system = "Be brief."
    chat.ask("one", nothing)
    chat.clear()
    assert chat.take_back() == ""
    chat.ask("two", nothing)
    assert said(parrot.requests[1]) == [("system", "Be brief."), ("user", "two")]


def test_the_oldest_questions_go_where_the_context_is_full() -> None:
    parrot = Parrot(max_messages=4)
    with served(parrot) as address, Client(address) as client:
        chat = Chat(client, SamplingParameters())
        chat.system = "Be brief."
        assert chat.ask("one", nothing).forgotten == 0
        assert chat.ask("two", nothing).forgotten == 0
        assert chat.ask("three", nothing).forgotten == 1
        assert said(parrot.requests[-1]) == [
            ("system", "Be brief."),
            ("user", "two"),
            ("assistant", "two "),
            ("user", "three"),
        ]


def test_a_question_that_is_too_long_alone_fails_and_nothing_is_forgotten() -> None:
    parrot = Parrot(max_messages=3)
    with served(parrot) as address, Client(address) as client:
        chat = Chat(client, SamplingParameters())
        chat.ask("one", nothing)
        parrot.max_messages = 0
        with pytest.raises(ContextLengthExceeded):
            chat.ask("two", nothing)
        parrot.max_messages = 3
        chat.ask("three", nothing)
        assert said(parrot.requests[-1])[0] == ("user", "one")


def test_models_are_listed(client: Client) -> None:
    assert [model.id for model in client.models()] == ["parrot"]


def test_one_input_is_needed(client: Client) -> None:
    with pytest.raises(ValueError, match="one of prompt, token_ids and messages"):
        client.generate()
    with pytest.raises(ValueError, match="one of prompt, token_ids and messages"):
        client.generate(prompt="a", token_ids=[1])


def test_an_absent_server_is_unavailable() -> None:
    address = f"127.0.0.1:{free_port()}"
    with Client(address) as client, pytest.raises(Unavailable, match=address):
        client.models(deadline_s=DEADLINE_S)


def test_errors_of_the_router_keep_their_meaning(client: Client) -> None:
    with pytest.raises(InvalidRequest, match="parrots need messages"):
        list(client.generate(prompt="x"))
