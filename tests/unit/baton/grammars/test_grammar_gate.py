"""Waiting for a grammar without holding up the event loop."""

from __future__ import annotations

import asyncio
import time

import pytest

from baton.errors import DeadlineExceeded, InvalidGrammar, Overloaded
from baton.grammars.grammar_gate import MAX_OF_TENANT
from tests.support.baton.grammar_tools import WAIT_S, SlowGrammars, encode, regex

SALT, OTHER = b"", b"other"


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def soon() -> float:
    return time.monotonic() + WAIT_S


async def test_no_grammar_and_a_kept_one_are_ready_at_once() -> None:
    slow = SlowGrammars()
    slow.may_go.set()
    await slow.gate.ready(None, SALT, 0.0)
    await slow.gate.ready(regex("a"), SALT, soon())
    slow.may_go.clear()
    await slow.gate.ready(regex("a"), SALT, 0.0)
    assert slow.compiled == ["a"]


async def test_a_matcher_is_handed_out_whatever_has_been_compiled_since() -> None:
    """The waiting one needs no place among the kept grammars."""
    slow = SlowGrammars(max_grammars=1)
    waiting = [
        asyncio.create_task(slow.gate.ready(regex(t), SALT, soon())) for t in ("a", "b", "c")
    ]
    await asyncio.sleep(0)
    slow.may_go.set()
    for text, found in zip("abc", await asyncio.gather(*waiting), strict=True):
        assert found is not None
        (token,) = encode(text)
        assert found.consume_token(token)
    assert slow.grammars.kept(regex("a"), SALT) is None
    assert slow.compiled == ["a", "b", "c"]


async def test_those_who_wait_for_one_share_it_and_the_loop_goes_on() -> None:
    slow = SlowGrammars()
    waiting = [asyncio.create_task(slow.gate.ready(regex("a"), SALT, soon())) for _ in range(3)]
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
    waiting = [asyncio.create_task(slow.gate.ready(regex("bad"), SALT, soon())) for _ in range(2)]
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
        await slow.gate.ready(regex("a"), SALT, time.monotonic())
    slow.may_go.set()
    await slow.gate.ready(regex("a"), SALT, soon())
    assert slow.compiled == ["a"]


async def test_one_that_gives_up_does_not_end_it_for_others() -> None:
    slow = SlowGrammars()
    first, second = (
        asyncio.create_task(slow.gate.ready(regex("a"), SALT, soon())) for _ in range(2)
    )
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait([first])
    slow.may_go.set()
    await second
    assert slow.compiled == ["a"]


async def test_a_tenant_has_a_share_of_the_places_and_others_have_theirs() -> None:
    slow = SlowGrammars()
    texts = [f"a{n}" for n in range(MAX_OF_TENANT + 1)]
    waiting = [asyncio.create_task(slow.gate.ready(regex(t), SALT, soon())) for t in texts]
    await settle()
    with pytest.raises(Overloaded, match=f"{MAX_OF_TENANT} new grammars") as refused:
        await slow.gate.ready(regex("b"), SALT, soon())
    assert refused.value.retry_after
    waiting.append(asyncio.create_task(slow.gate.ready(regex("b"), OTHER, soon())))
    await settle()
    slow.may_go.set()
    await asyncio.gather(*waiting)
    await slow.gate.ready(regex("b"), SALT, soon())
    assert len(slow.compiled) == len(texts) + 2


async def test_a_grammar_is_ready_while_one_of_another_tenant_compiles() -> None:
    slow = SlowGrammars()
    held = asyncio.create_task(slow.gate.ready(regex("held"), SALT, soon()))
    next_of_tenant = asyncio.create_task(slow.gate.ready(regex("a"), SALT, soon()))
    await settle()
    slow.may_go.set()
    await slow.gate.ready(regex("b"), OTHER, soon())
    assert slow.compiled == ["b"]
    assert not held.done()
    assert not next_of_tenant.done()
    slow.release_held.set()
    await asyncio.gather(held, next_of_tenant)
    assert slow.compiled == ["b", "held", "a"]


async def test_a_grammar_begun_in_vain_is_begun_by_the_request() -> None:
    slow = SlowGrammars()
    for n in range(MAX_OF_TENANT + 1):
        slow.gate.begin(regex(f"a{n}"), SALT)
    await settle()
    slow.gate.begin(regex("b"), SALT)
    await settle()
    slow.may_go.set()
    while not slow.gate.idle:
        await asyncio.sleep(0.001)
    assert "b" not in slow.compiled
    await slow.gate.ready(regex("b"), SALT, soon())
    assert slow.compiled[-1] == "b"


async def test_what_one_tenant_has_compiled_is_not_ready_for_another() -> None:
    slow = SlowGrammars()
    slow.may_go.set()
    await slow.gate.ready(regex("a"), SALT, soon())
    slow.may_go.clear()
    with pytest.raises(DeadlineExceeded):
        await slow.gate.ready(regex("a"), OTHER, time.monotonic())
    slow.may_go.set()
    await slow.gate.ready(regex("a"), OTHER, soon())
    assert slow.compiled == ["a", "a"]


async def test_what_nothing_waits_for_any_more_is_not_compiled() -> None:
    slow = SlowGrammars()
    first = asyncio.create_task(slow.gate.ready(regex("a"), SALT, soon()))
    await settle()
    left = asyncio.create_task(slow.gate.ready(regex("b"), SALT, soon()))
    await settle()
    left.cancel()
    await asyncio.wait([left])
    last = asyncio.create_task(slow.gate.ready(regex("c"), SALT, soon()))
    slow.may_go.set()
    await asyncio.gather(first, last)
    assert slow.compiled == ["a", "c"]


async def test_a_dropped_grammar_can_be_requested_again_at_once() -> None:
    slow = SlowGrammars()
    first = asyncio.create_task(slow.gate.ready(regex("a"), SALT, soon()))
    await settle()
    with pytest.raises(DeadlineExceeded):
        await slow.gate.ready(regex("b"), SALT, time.monotonic())
    again = asyncio.create_task(slow.gate.ready(regex("b"), SALT, soon()))
    slow.may_go.set()
    assert await again is not None
    assert await first is not None
    assert slow.compiled == ["a", "b"]
