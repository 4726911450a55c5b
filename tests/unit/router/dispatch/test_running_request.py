"""A request's tokens, in any order and with any repetition."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, DeadlineExceeded, Unavailable, WorkerFailed
from baton.logprobs import TokenLogprobs
from baton.request import NO_TRACE, FinishReason, Principal, TokenOutput
from baton.sampling_params import SamplingParams
from router.core.request import GenerationRequest, OutputDelta
from router.dispatch.deliveries import Deliveries
from router.dispatch.running_request import RunningRequest
from router.text.output_processor import ByteDetokenizer, OutputProcessor
from tests.support.router.workers import record

STOP = FinishReason.STOP


def make_choices(count: int, stop: tuple[str, ...] = (), *, scores: bool = False) -> RunningRequest:
    def processor() -> OutputProcessor:
        return OutputProcessor(ByteDetokenizer(lambda token: bytes([token]), {}), stop)

    sampling = SamplingParams(prompt_logprobs=0 if scores else None)
    request = GenerationRequest("r", (1, 2), sampling, Principal(), 60.0, choices=count)
    return RunningRequest(request, processor, 60.0)


def make_running(stop: tuple[str, ...] = ()) -> RunningRequest:
    return make_choices(1, stop)


def output(
    index: int, text: str, finish: FinishReason | None = None, attempt: int = 0
) -> TokenOutput:
    return TokenOutput("r", attempt, index, tuple(text.encode()), finish)


async def read_all(running: RunningRequest) -> tuple[str, FinishReason | None, int]:
    """All that is there, up to the end. Raises what the request raises."""
    text, cached = "", 0
    async with asyncio.timeout(60):
        while True:
            delta = await running.next_delta()
            text += delta.text
            cached += delta.cached_prompt_tokens
            if delta.finish_reason is not None:
                return text, delta.finish_reason, cached


async def test_tokens_in_order_are_coalesced_for_a_slow_reader() -> None:
    running = make_running()
    for index, letter in enumerate("abc"):
        running.accept(output(index, letter))
    delta = await running.next_delta()
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("abc", (97, 98, 99), None)
    running.accept(output(3, "d", STOP))
    delta = await running.next_delta()
    assert (delta.text, delta.finish_reason) == ("d", STOP)
    assert all(choice.worker_finished for choice in running.choices)


async def test_tokens_that_came_together_were_drafted() -> None:
    """Except for the first of each step; joined deltas have the sum."""
    running = make_running()
    running.accept(output(0, "a"))
    running.accept(output(1, "bcd"))
    running.accept(output(4, "ef"))
    assert (await running.next_delta()).accepted_drafts == 3
    running.accept(output(5, "fg"))
    assert (await running.next_delta()).accepted_drafts == 0, "one of them was known"
    running.accept(output(7, "h", STOP))
    assert (await running.next_delta()).accepted_drafts == 0


def test_a_request_without_prefix_cache_has_blocks_of_its_own() -> None:
    """Of the same salt wherever it is placed, and of no other's."""
    first, second = (
        replace(
            make_running().request,
            request_id=name,
            cache_salt=b"salt",
            without_prefix_cache=True,
            without_speculation=True,
        )
        for name in "ab"
    )
    assert first.block_salt == replace(first, priority=5).block_salt
    assert len({first.block_salt, second.block_salt, b"salt"}) == 3
    running = make_running()
    running.request = first
    spec = running.sequence_spec("router", (0,), "short", 1.0, NO_TRACE, scored=False)
    assert (spec.cache_salt, spec.without_speculation) == (first.block_salt, True)


async def test_the_first_token_is_reported_by_both_workers() -> None:
    """The decode worker repeats it; the cached count comes with the prefill worker's."""
    running = make_running()
    running.accept(output(0, "a"))
    running.accept(output(1, "b", STOP))
    running.accept(output(0, "a"), cached_prompt_tokens=16)
    assert await read_all(running) == ("ab", STOP, 0)
    running = make_running()
    running.accept(output(0, "a"), cached_prompt_tokens=16)
    running.accept(output(0, "a"))
    running.accept(output(1, "b", STOP))
    assert await read_all(running) == ("ab", STOP, 16)


async def test_an_end_that_brings_no_new_token_is_an_end() -> None:
    running = make_running()
    running.accept(output(0, "ab"))
    running.accept(output(1, "b", STOP))
    assert await read_all(running) == ("ab", STOP, 0)


async def test_another_attempts_tokens_are_dropped() -> None:
    running = make_running()
    running.choices[0].place(1, record("prefill-0"), record("decode-0"))
    running.accept(output(0, "x", STOP, attempt=0))
    running.accept(TokenOutput("r", 0, 0, (), error="an old failure"))
    running.accept(output(0, "a", STOP, attempt=1))
    assert await read_all(running) == ("a", STOP, 0)


async def test_what_follows_a_stop_string_is_not_shown() -> None:
    running = make_running(stop=("END",))
    running.accept(output(0, "abENDcd"))
    assert await read_all(running) == ("ab", STOP, 0)
    assert running.stopped
    assert not running.choices[0].worker_finished, "the worker's sequence is still to be ended"
    running.fail(WorkerFailed("too late"))
    running.accept(output(7, "e", FinishReason.LENGTH))
    assert all(choice.worker_finished for choice in running.choices)


async def test_a_failure_comes_after_what_was_generated() -> None:
    running = make_running()
    running.accept(output(0, "ab"))
    running.fail(WorkerFailed("the worker died"))
    running.fail(BatonError("a second failure"))
    assert (await running.next_delta()).text == "ab"
    with pytest.raises(WorkerFailed, match="the worker died"):
        await running.next_delta()


async def test_a_workers_error_keeps_its_kind() -> None:
    running = make_running()
    running.accept(
        TokenOutput("r", 0, 0, (), error="the time is up", error_code="deadline_exceeded")
    )
    with pytest.raises(DeadlineExceeded, match="the time is up"):
        await running.next_delta()


async def test_a_workers_own_error_is_no_internal_error() -> None:
    running = make_running()
    running.accept(TokenOutput("r", 0, 0, (), error="the decode worker is stopping"))
    with pytest.raises(Unavailable, match="is stopping"):
        await running.next_delta()


async def test_a_failure_after_the_end_is_no_failure() -> None:
    running = make_running()
    running.accept(output(0, "a", STOP))
    running.fail(WorkerFailed("too late"))
    assert await read_all(running) == ("a", STOP, 0)


async def test_thousands_of_early_tokens() -> None:
    running = make_running()
    for index in range(1, 3000):
        running.accept(output(index, "b"))
    running.accept(output(0, "a"))
    assert (await running.next_delta()).text == "a" + 2999 * "b"


@st.composite
def pieces(draw: st.DrawFn) -> list[TokenOutput]:
    """An answer of 12 letters, cut in several ways and shuffled."""
    text = "abcdefghijkl"
    cut: list[TokenOutput] = []
    for _ in range(draw(st.integers(1, 3))):
        ends = sorted({*draw(st.sets(st.integers(1, 11), max_size=6)), 12})
        for start, end in zip([0, *ends], ends, strict=False):
            cut.append(output(start, text[start:end], STOP if end == 12 else None))
    return draw(st.permutations(cut))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(pieces())
def test_any_order_cut_and_repetition_is_one_answer(told: list[TokenOutput]) -> None:
    async def run() -> None:
        running = make_running()
        for piece in told:
            running.accept(piece)
        assert await read_all(running) == ("abcdefghijkl", STOP, 0)
        assert bytes(running.choices[0].token_ids) == b"abcdefghijkl"

    asyncio.run(run())


def choice_output(choice: int, index: int, text: str, *, ends: bool = False) -> TokenOutput:
    finish = STOP if ends else None
    return TokenOutput("r", 0, index, tuple(text.encode()), finish, choice=choice)


async def read_choices(running: RunningRequest) -> dict[int, str]:
    texts: dict[int, str] = {}
    async with asyncio.timeout(60):
        while not running.finished:
            delta = await running.next_delta()
            texts[delta.choice] = texts.get(delta.choice, "") + delta.text
    return texts


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_choices_do_not_mix(texts: list[str], data: st.DataObject) -> None:
    """In any order and with any repetition of their tokens."""
    outputs = [
        choice_output(choice, index, text[index], ends=index == len(text) - 1)
        for choice, text in enumerate(texts)
        for index in range(len(text))
    ]
    told = data.draw(st.permutations(outputs * 2))

    async def run() -> None:
        running = make_choices(len(texts))
        for output in told:
            running.accept(output)
        assert await read_choices(running) == dict(enumerate(texts))
        assert all(choice.worker_finished for choice in running.choices)

    asyncio.run(run())


async def test_the_last_delta_names_the_workers_where_the_choice_was_last() -> None:
    running = make_choices(2)
    for choice in running.choices:
        choice.place(0, record("prefill-0"), record("decode-0"))
    running.accept(choice_output(0, 0, "a", ends=True))
    running.accept(choice_output(1, 0, "b"))
    first, unfinished = await running.next_delta(), await running.next_delta()
    running.choices[1].place(1, record("prefill-1"), record("decode-1"))
    running.accept(replace(choice_output(1, 1, "c", ends=True), attempt=1))
    moved = await running.next_delta()
    assert [(one.prefill_worker, one.decode_worker) for one in (first, unfinished, moved)] == [
        ("prefill-0", "decode-0"),
        ("", ""),
        ("prefill-1", "decode-1"),
    ]


async def test_tokens_that_came_early_go_with_their_attempt() -> None:
    running = make_running()
    running.accept(output(2, "x"))
    running.choices[0].place(1, record("prefill-1"), record("decode-1"))
    running.accept(output(0, "ab", attempt=1))
    assert (await running.next_delta()).text == "ab"
    running.accept(output(2, "c", STOP, attempt=1))
    assert await read_all(running) == ("c", STOP, 0)


async def test_a_choice_that_is_stopped_is_ended_once() -> None:
    running = make_choices(2, ("b",))
    running.accept(choice_output(0, 0, "ab"))
    assert running.several
    assert running.take_stopped() == [0]
    assert running.take_stopped() == []
    running.accept(choice_output(1, 0, "a", ends=True))
    assert await read_choices(running) == {0: "a", 1: "a"}
    assert not all(choice.worker_finished for choice in running.choices)
    assert running.stopped


async def test_nothing_is_given_before_the_prompts_scores() -> None:
    """The decode worker may tell of the first token before the prefill worker's answer is read."""
    running = make_choices(2, scores=True)
    running.accept(choice_output(1, 0, "x"))
    running.accept(choice_output(0, 0, "a"))
    waiting = asyncio.ensure_future(running.next_delta())
    await asyncio.sleep(0)
    assert not waiting.done()
    scores = (TokenLogprobs(-1.0),)
    running.accept(TokenOutput("r", 0, 0, (97,), prompt_logprobs=scores))
    delta = await waiting
    assert (delta.choice, delta.text, delta.prompt_logprobs) == (0, "a", scores)
    assert (await running.next_delta()).prompt_logprobs == ()
    lost = make_choices(2, scores=True)
    lost.fail(WorkerFailed("gone"))
    with pytest.raises(WorkerFailed):
        await lost.next_delta()


async def test_nothing_is_given_before_the_prompts_embedding() -> None:
    """A decode worker that computes the prompt tells of the token by its stream, too."""
    running = make_choices(1, scores=True)
    running.accept(choice_output(0, 0, "a", ends=True))
    waiting = asyncio.ensure_future(running.next_delta())
    await asyncio.sleep(0)
    assert not waiting.done()
    running.accept(TokenOutput("r", 0, 0, (97,), STOP, embedding=(0.6, 0.8)))
    assert (await waiting).embedding == (0.6, 0.8)
    assert running.finished


async def test_an_answer_that_awaits_its_prompts_part_can_fail() -> None:
    """The token stream has brought all of it, and the stream of prefills breaks."""
    running = make_choices(1, scores=True)
    running.accept(choice_output(0, 0, "a", ends=True))
    waiting = asyncio.ensure_future(running.next_delta())
    await asyncio.sleep(0)
    running.fail(WorkerFailed("the prefill worker died"))
    with pytest.raises(WorkerFailed, match="the prefill worker died"):
        async with asyncio.timeout(60):
            await waiting


async def test_a_prompts_part_that_is_there_leaves_nothing_to_fail() -> None:
    """The stream of prefills comes first, and the token stream breaks after the last token."""
    running = make_choices(1, scores=True)
    running.accept(TokenOutput("r", 0, 0, (97,), embedding=(0.6, 0.8)))
    running.accept(choice_output(0, 1, "b", ends=True))
    running.fail(WorkerFailed("too late"))
    delta = await running.next_delta()
    assert (delta.text, delta.embedding) == ("ab", (0.6, 0.8))
    assert running.finished


async def test_a_prompts_part_without_an_answer_can_fail() -> None:
    running = make_choices(1, scores=True)
    running.accept(TokenOutput("r", 0, 0, (97,), prompt_logprobs=(TokenLogprobs(-1.0),)))
    running.fail(WorkerFailed("the decode worker died"))
    assert (await running.next_delta()).text == "a"
    with pytest.raises(WorkerFailed, match="the decode worker died"):
        await running.next_delta()


async def test_what_is_unread_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a slow client leaves: each token costs the same."""
    made: list[int] = []
    real = OutputDelta.__init__

    def init(self: OutputDelta, text: str, *rest: Any, **more: Any) -> None:
        made.append(len(text))
        real(self, text, *rest, **more)

    monkeypatch.setattr(OutputDelta, "__init__", init)
    running = make_running()
    for index in range(1000):
        running.accept(
            TokenOutput("r", 0, index, (97,), logprobs=(TokenLogprobs(-float(index)),)),
            cached_prompt_tokens=16 if index == 0 else 0,
        )
    running.accept(output(1000, "b", STOP))
    assert max(made) < 100
    assert sum(made) <= 2 * 1001
    delta = await running.next_delta()
    assert (delta.text, delta.finish_reason) == (1000 * "a" + "b", STOP)
    assert (len(delta.token_ids), delta.cached_prompt_tokens) == (1001, 16)
    assert [scored.logprobs.logprob for scored in delta.scored[:1000]] == [
        -float(index) for index in range(1000)
    ]
    assert made.count(1001) == 1


# Relays


class Client:
    """A client that reads what a relay passes on, as long as it has room."""

    def __init__(self, running: RunningRequest) -> None:
        self.got: list[str] = []
        self.has_room = True
        self.bugs: list[Exception] = []
        running.relay_through(Deliveries(), self.relay)

    def relay(self, delta: OutputDelta) -> bool:
        if self.bugs:
            raise self.bugs.pop()
        if self.has_room:
            self.got.append(f"{delta.choice}{delta.text}")
        return self.has_room


async def parked(running: RunningRequest) -> asyncio.Task[OutputDelta]:
    """The reader, which waits for the next delta."""
    reader = asyncio.create_task(running.next_delta())
    await asyncio.sleep(0)
    return reader


async def test_tokens_are_relayed_while_the_reader_waits() -> None:
    running = make_choices(2)
    client = Client(running)
    reader = await parked(running)
    running.accept_tokens(0, 0, 0, (97,))
    running.accept_tokens(1, 0, 0, (98,))
    running.accept_tokens(0, 0, 1, (99,))
    running.accept_tokens(0, 1, 0, (100,))
    assert client.got == [], "not before the message is read"
    await asyncio.sleep(0)
    assert client.got == ["0ac", "1b"]
    running.accept_tokens(0, 0, 1, (99, 100))
    await asyncio.sleep(0)
    assert client.got == ["0ac", "1b", "0d"], "a token that came twice counts once"
    assert not reader.done()
    running.accept_tokens(0, 0, 3, (101,))
    running.accept(output(4, "f", STOP))
    delta = await reader
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("ef", (101, 102), STOP)
    await asyncio.sleep(0)
    assert client.got == ["0ac", "1b", "0d"]


async def test_what_a_relay_refuses_goes_to_the_reader_in_order() -> None:
    running = make_running()
    client = Client(running)
    client.has_room = False
    reader = await parked(running)
    running.accept_tokens(0, 0, 0, (97,))
    running.accept_tokens(0, 0, 1, (98,))
    assert (await reader).text == "ab"
    client.has_room = True
    running.accept_tokens(0, 0, 2, (99,))
    await asyncio.sleep(0)
    assert client.got == [], "the reader passes on what came before"
    assert (await running.next_delta()).text == "c"
    reader = await parked(running)
    running.accept_tokens(0, 0, 3, (100,))
    await asyncio.sleep(0)
    assert client.got == ["0d"]
    reader.cancel()
    await asyncio.wait([reader])
    running.accept_tokens(0, 0, 4, (101,))
    await asyncio.sleep(0)
    assert client.got == ["0d"], "the request has ended"


async def test_early_and_stopped_tokens_are_no_matter_of_the_relay() -> None:
    running = make_running(("de",))
    client = Client(running)
    reader = await parked(running)
    running.accept_tokens(0, 0, 1, (98,))
    await asyncio.sleep(0)
    assert client.got == []
    running.accept_tokens(0, 0, 0, (97,))
    await asyncio.sleep(0)
    assert client.got == ["0ab"]
    running.accept_tokens(0, 0, 2, (99, 100, 101))
    delta = await reader
    assert (delta.text, delta.finish_reason, delta.stop_string) == ("c", STOP, "de")
    assert client.got == ["0ab"]


async def test_a_relay_that_fails_fails_its_request() -> None:
    running = make_running()
    client = Client(running)
    client.bugs.append(KeyError("a bug of what formats events"))
    reader = await parked(running)
    running.accept_tokens(0, 0, 0, (97,))
    with pytest.raises(KeyError):
        await reader


@pytest.mark.parametrize("busy", [True, False])
async def test_a_request_that_fails_is_over_after_its_tokens(busy: bool) -> None:
    running = make_running()
    client = Client(running)
    reader = None if busy else await parked(running)
    running.accept_tokens(0, 0, 0, (97,))
    running.fail(WorkerFailed("it is gone"))
    reader = reader or await parked(running)
    assert (await reader).text == "a"
    with pytest.raises(WorkerFailed):
        await running.next_delta()
    assert client.got == []
