"""Waiting for a grammar without holding up the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.errors import DeadlineExceeded, InvalidGrammar, Overloaded
from baton.grammars.grammar_gate import MAX_WAITING
from tests.support.baton.grammar_tools import WAIT_S, SlowGrammars, encode, regex


def soon() -> float:
    return time.monotonic() + WAIT_S


async def test_no_grammar_and_a_kept_one_are_ready_at_once() -> None:
    slow = SlowGrammars()
    slow.may_go.set()
    await slow.gate.ready(None, 0.0)
    await slow.gate.ready(regex("a"), soon())
    slow.may_go.clear()
    await slow.gate.ready(regex("a"), 0.0)
    assert slow.compiled == ["a"]


async def test_a_matcher_is_handed_out_whatever_has_been_compiled_since() -> None:
    """The waiting one needs no place among the kept grammars."""
    slow = SlowGrammars(most=1)
    waiting = [asyncio.create_task(slow.gate.ready(regex(t), soon())) for t in ("a", "b", "c")]
    await asyncio.sleep(0)
    slow.may_go.set()
    for text, found in zip("abc", await asyncio.gather(*waiting), strict=True):
        assert found is not None
        (token,) = encode(text)
        assert found.consume_token(token)
    assert regex("a") not in slow.grammars
    assert slow.compiled == ["a", "b", "c"]


async def test_those_who_wait_for_one_share_it_and_the_loop_goes_on() -> None:
    slow = SlowGrammars()
    waiting = [asyncio.create_task(slow.gate.ready(regex("a"), soon())) for _ in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    slow.may_go.set()
    await asyncio.gather(*waiting)
    assert slow.compiled == ["a"]
    assert len(slow.seconds) == 1
    assert slow.seconds[0] >= 0


async def test_refusals_reach_all() -> None:
    slow = SlowGrammars()
    waiting = [asyncio.create_task(slow.gate.ready(regex("bad"), soon())) for _ in range(2)]
    await asyncio.sleep(0)
    slow.may_go.set()
    for result in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(result, InvalidGrammar)
        assert result.message == "it is bad"
    assert slow.compiled == ["bad"]
    assert not slow.seconds


async def test_a_deadline_ends_the_waiting_and_not_the_work() -> None:
    slow = SlowGrammars()
    with pytest.raises(DeadlineExceeded):
        await slow.gate.ready(regex("a"), time.monotonic())
    slow.may_go.set()
    await slow.gate.ready(regex("a"), soon())
    assert slow.compiled == ["a"]


async def test_one_that_gives_up_does_not_end_it_for_others() -> None:
    slow = SlowGrammars()
    first, second = (asyncio.create_task(slow.gate.ready(regex("a"), soon())) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    slow.may_go.set()
    await second
    assert slow.compiled == ["a"]


async def test_the_line_is_bounded() -> None:
    slow = SlowGrammars()
    waiting = [
        asyncio.create_task(slow.gate.ready(regex(f"a{n}"), soon())) for n in range(MAX_WAITING)
    ]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await slow.gate.ready(regex("b"), soon())
    slow.may_go.set()
    await asyncio.gather(*waiting)
    await slow.gate.ready(regex("b"), soon())
    assert len(slow.compiled) == MAX_WAITING + 1
