"""A request's tokens, in whatever order and however often they are told."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import BatonError, DeadlineExceeded, Unavailable, WorkerFailed
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, TokenOutput
from router.core.request import OutputDelta
from router.dispatch.request_life import RequestLife
from router.text.detokenizer import ByteDetokenizer
from router.text.output_processor import OutputProcessor

STOP = FinishReason.STOP


def make_life(stop: tuple[str, ...] = (), attempt: int = 0) -> RequestLife:
    detokenizer = ByteDetokenizer(lambda token: bytes([token]))
    return RequestLife("r", attempt, OutputProcessor(detokenizer, stop))


def output(
    index: int, text: str, finish: FinishReason | None = None, attempt: int = 0
) -> TokenOutput:
    return TokenOutput("r", attempt, index, tuple(text.encode()), finish)


async def read_all(life: RequestLife) -> tuple[str, FinishReason | None, int]:
    """All that is there, up to the end. Raises what the life raises."""
    text, cached = "", 0
    async with asyncio.timeout(60):
        while True:
            delta = await life.next_delta()
            text += delta.text
            cached += delta.cached_prompt_tokens
            if delta.finish_reason is not None:
                return text, delta.finish_reason, cached


async def test_tokens_in_order_are_coalesced_for_a_slow_reader() -> None:
    life = make_life()
    for index, letter in enumerate("abc"):
        life.accept(output(index, letter))
    delta = await life.next_delta()
    assert (delta.text, delta.token_ids, delta.finish_reason) == ("abc", (97, 98, 99), None)
    life.accept(output(3, "d", STOP))
    delta = await life.next_delta()
    assert (delta.text, delta.finish_reason) == ("d", STOP)
    assert life.worker_finished


async def test_the_first_token_is_told_by_both_workers() -> None:
    """The decode worker repeats it; the cached count comes with the prefill worker's."""
    life = make_life()
    life.accept(output(0, "a"))
    life.accept(output(1, "b", STOP))
    life.accept(output(0, "a"), cached_prompt_tokens=16)
    assert await read_all(life) == ("ab", STOP, 0)
    life = make_life()
    life.accept(output(0, "a"), cached_prompt_tokens=16)
    life.accept(output(0, "a"))
    life.accept(output(1, "b", STOP))
    assert await read_all(life) == ("ab", STOP, 16)


async def test_an_end_that_brings_no_new_token_is_an_end() -> None:
    life = make_life()
    life.accept(output(0, "ab"))
    life.accept(output(1, "b", STOP))
    assert await read_all(life) == ("ab", STOP, 0)


async def test_another_attempts_tokens_are_dropped() -> None:
    life = make_life(attempt=1)
    life.accept(output(0, "x", STOP, attempt=0))
    life.accept(TokenOutput("r", 0, 0, (), error="an old failure"))
    life.accept(output(0, "a", STOP, attempt=1))
    assert await read_all(life) == ("a", STOP, 0)


async def test_what_follows_a_stop_string_is_not_shown() -> None:
    life = make_life(stop=("END",))
    life.accept(output(0, "abENDcd"))
    assert await read_all(life) == ("ab", STOP, 0)
    assert life.stopped
    assert not life.worker_finished, "the worker's sequence is still to be ended"
    life.fail(WorkerFailed("too late"))
    life.accept(output(7, "e", FinishReason.LENGTH))
    assert life.worker_finished


async def test_a_failure_comes_after_what_was_generated() -> None:
    life = make_life()
    life.accept(output(0, "ab"))
    life.fail(WorkerFailed("the worker died"))
    life.fail(BatonError("a second failure"))
    assert (await life.next_delta()).text == "ab"
    with pytest.raises(WorkerFailed, match="the worker died"):
        await life.next_delta()


async def test_a_workers_error_keeps_its_kind() -> None:
    life = make_life()
    life.accept(TokenOutput("r", 0, 0, (), error="the time is up", error_code="deadline_exceeded"))
    with pytest.raises(DeadlineExceeded, match="the time is up"):
        await life.next_delta()
    assert life.worker_finished


async def test_a_workers_own_error_is_no_internal_error() -> None:
    life = make_life()
    life.accept(TokenOutput("r", 0, 0, (), error="the decode worker is stopping"))
    assert life.worker_finished
    with pytest.raises(Unavailable, match="is stopping"):
        await life.next_delta()


async def test_a_failure_after_the_end_is_no_failure() -> None:
    life = make_life()
    life.accept(output(0, "a", STOP))
    life.fail(WorkerFailed("too late"))
    assert await read_all(life) == ("a", STOP, 0)


async def test_thousands_of_early_tokens() -> None:
    life = make_life()
    for index in range(1, 3000):
        life.accept(output(index, "b"))
    life.accept(output(0, "a"))
    assert (await life.next_delta()).text == "a" + 2999 * "b"


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
        life = make_life()
        for piece in told:
            life.accept(piece)
        assert await read_all(life) == ("abcdefghijkl", STOP, 0)
        assert bytes(life.token_ids) == b"abcdefghijkl"

    asyncio.run(run())


def choice_output(choice: int, index: int, text: str, *, ends: bool = False) -> TokenOutput:
    finish = STOP if ends else None
    return TokenOutput("r", 0, index, tuple(text.encode()), finish, choice=choice)


def make_choices(count: int, stop: tuple[str, ...] = (), *, scores: bool = False) -> RequestLife:
    def assembler() -> OutputProcessor:
        return OutputProcessor(ByteDetokenizer(lambda token: bytes([token])), stop)

    return RequestLife("r", 0, *(assembler() for _ in range(count)), awaits_prompt=scores)


async def read_choices(life: RequestLife) -> dict[int, str]:
    texts: dict[int, str] = {}
    async with asyncio.timeout(60):
        while not life.finished:
            delta = await life.next_delta()
            texts[delta.choice] = texts.get(delta.choice, "") + delta.text
    return texts


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
def test_choices_do_not_mix(texts: list[str], data: st.DataObject) -> None:
    """In whatever order and however often their tokens are told."""
    outputs = [
        choice_output(choice, index, text[index], ends=index == len(text) - 1)
        for choice, text in enumerate(texts)
        for index in range(len(text))
    ]
    told = data.draw(st.permutations(outputs * 2))

    async def run() -> None:
        life = make_choices(len(texts))
        for output in told:
            life.accept(output)
        assert await read_choices(life) == dict(enumerate(texts))
        assert life.worker_finished

    asyncio.run(run())


async def test_the_last_delta_names_the_workers_where_the_choice_was_last() -> None:
    life = make_choices(2)
    for choice in life.choices:
        choice.place(0, "prefill-0", "decode-0")
    life.accept(choice_output(0, 0, "a", ends=True))
    life.accept(choice_output(1, 0, "b"))
    first, unfinished = await life.next_delta(), await life.next_delta()
    life.choices[1].place(1, "prefill-1", "decode-1")
    life.accept(replace(choice_output(1, 1, "c", ends=True), attempt=1))
    moved = await life.next_delta()
    assert [(one.prefill_worker, one.decode_worker) for one in (first, unfinished, moved)] == [
        ("prefill-0", "decode-0"),
        ("", ""),
        ("prefill-1", "decode-1"),
    ]


async def test_a_choice_that_is_stopped_is_ended_once() -> None:
    life = make_choices(2, ("b",))
    life.accept(choice_output(0, 0, "ab"))
    assert life.several
    assert life.take_stopped() == [0]
    assert life.take_stopped() == []
    life.accept(choice_output(1, 0, "a", ends=True))
    assert await read_choices(life) == {0: "a", 1: "a"}
    assert not life.worker_finished
    assert life.stopped


async def test_nothing_is_given_before_the_prompts_scores() -> None:
    """The decode worker may tell of the first token before the prefill worker's answer is read."""
    life = make_choices(2, scores=True)
    life.accept(choice_output(1, 0, "x"))
    life.accept(choice_output(0, 0, "a"))
    waiting = asyncio.ensure_future(life.next_delta())
    await asyncio.sleep(0)
    assert not waiting.done()
    scores = (TokenLogprobs(-1.0),)
    life.accept(TokenOutput("r", 0, 0, (97,), prompt_logprobs=scores))
    delta = await waiting
    assert (delta.choice, delta.text, delta.prompt_logprobs) == (0, "a", scores)
    assert (await life.next_delta()).prompt_logprobs == ()
    life.awaits_prompt = True
    life.fail(WorkerFailed("gone"))
    with pytest.raises(WorkerFailed):
        await life.next_delta()


async def test_nothing_is_given_before_the_prompts_embedding() -> None:
    """A decode worker that computes the prompt tells of the token by its stream, too."""
    life = make_choices(1, scores=True)
    life.accept(choice_output(0, 0, "a", ends=True))
    waiting = asyncio.ensure_future(life.next_delta())
    await asyncio.sleep(0)
    assert not waiting.done()
    life.accept(TokenOutput("r", 0, 0, (97,), STOP, embedding=(0.6, 0.8)))
    assert (await waiting).embedding == (0.6, 0.8)
    assert life.finished


async def test_an_answer_that_awaits_its_prompts_part_can_fail() -> None:
    """The token stream has brought all of it, and the stream of prefills breaks."""
    life = make_choices(1, scores=True)
    life.accept(choice_output(0, 0, "a", ends=True))
    waiting = asyncio.ensure_future(life.next_delta())
    await asyncio.sleep(0)
    life.fail(WorkerFailed("the prefill worker died"))
    with pytest.raises(WorkerFailed, match="the prefill worker died"):
        async with asyncio.timeout(60):
            await waiting


async def test_a_prompts_part_that_is_there_leaves_nothing_to_fail() -> None:
    """The stream of prefills comes first, and the token stream breaks after the last token."""
    life = make_choices(1, scores=True)
    life.accept(TokenOutput("r", 0, 0, (97,), embedding=(0.6, 0.8)))
    life.accept(choice_output(0, 1, "b", ends=True))
    life.fail(WorkerFailed("too late"))
    delta = await life.next_delta()
    assert (delta.text, delta.embedding) == ("ab", (0.6, 0.8))
    assert life.finished


async def test_a_prompts_part_without_an_answer_can_fail() -> None:
    life = make_choices(1, scores=True)
    life.accept(TokenOutput("r", 0, 0, (97,), prompt_logprobs=(TokenLogprobs(-1.0),)))
    life.fail(WorkerFailed("the decode worker died"))
    assert (await life.next_delta()).text == "a"
    with pytest.raises(WorkerFailed, match="the decode worker died"):
        await life.next_delta()


async def test_what_is_unread_is_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However much a slow client leaves: each token costs the same."""
    made: list[int] = []
    real = OutputDelta.__init__

    def init(self: OutputDelta, text: str, *rest: Any, **more: Any) -> None:
        made.append(len(text))
        real(self, text, *rest, **more)

    monkeypatch.setattr(OutputDelta, "__init__", init)
    life = make_life()
    for index in range(1000):
        life.accept(
            TokenOutput("r", 0, index, (97,), logprobs=(TokenLogprobs(-float(index)),)),
            cached_prompt_tokens=16 if index == 0 else 0,
        )
    life.accept(output(1000, "b", STOP))
    assert max(made) < 100
    assert sum(made) <= 2 * 1001
    delta = await life.next_delta()
    assert (delta.text, delta.finish_reason) == (1000 * "a" + "b", STOP)
    assert (len(delta.token_ids), delta.cached_prompt_tokens) == (1001, 16)
    assert [scored.logprobs.logprob for scored in delta.scored[:1000]] == [
        -float(index) for index in range(1000)
    ]
    assert made.count(1001) == 1
