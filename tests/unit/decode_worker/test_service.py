"""What a decode worker sends on a router's token stream: nothing is lost, nothing goes twice."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, LoadSnapshot, SequenceSpec, TokenOutput
from baton.rpc import convert
from baton.rpc.grpc_channel import MESSAGE_LIMIT
from baton.sampling_params import SamplingParams
from baton.v1 import decode_pb2
from decode_worker.role import DecodeRole
from decode_worker.sequences import Outbox, RunningSequences
from decode_worker.service import DecodeServicer
from engine.scheduling.sequence import Sequence
from worker.services import DEFAULT_KEEPALIVE


class Role:
    """A role that only has an outbox."""

    def __init__(self) -> None:
        self.box = Outbox(0.0)
        self.clock = time.monotonic
        self.closing = asyncio.Event()
        self.keepalive = DEFAULT_KEEPALIVE
        self.context = SimpleNamespace(core=SimpleNamespace(load=LoadSnapshot))
        self.sequences = SimpleNamespace(outbox=lambda _: self.box)

        self.is_full = False

    def has_work_of(self, router_id: str) -> bool:
        return True


async def test_what_gathered_while_a_router_stood_still_goes_in_several_messages() -> None:
    role = Role()
    stream = DecodeServicer(cast(DecodeRole, role)).StreamTokens(
        decode_pb2.StreamTokensRequest(router_id="router"), cast(Any, None)
    )
    assert list((await anext(stream)).outputs) == []
    text = "x" * (3 << 20)
    count = 1 + MESSAGE_LIMIT // len(text)
    for index in range(count):
        role.box.put(TokenOutput("r", 0, index, (), error=text))
    role.box.flush()
    messages: list[decode_pb2.StreamTokensResponse] = []
    while sum(len(message.outputs) for message in messages) < count:
        messages.append(await anext(stream))
    assert all(message.ByteSize() < MESSAGE_LIMIT for message in messages)
    told = [output.index for message in messages for output in message.outputs]
    assert told == list(range(count))
    role.closing.set()
    role.box.hurry()
    assert [list(message.outputs) async for message in stream] in ([[]], [[], []])


def sequence(
    number: int, *, length: int, choice: int = 0, finish: FinishReason | None = None
) -> Sequence:
    """A sequence whose router has placed choices from 2 on."""
    spec = SequenceSpec("r", 0, "router", (1,), 1, SamplingParams(), choice=2, output_number=number)
    made = SimpleNamespace(spec=spec, output_length=length, choice=choice, finish_reason=finish)
    return cast(Sequence, made)


async def test_tokens_go_packed_to_a_router_that_reads_them() -> None:
    sequences = RunningSequences("decode-0", lambda: 0.0)
    role = Role()
    role.box = sequences.outbox("router")
    scores = (TokenLogprobs(-1.0, ()),)
    sequences.send(sequence(7, length=1, choice=2), (10,))
    sequences.send(sequence(7, length=5, choice=3), (11, 12))
    sequences.send(sequence(0, length=1, choice=2), (13,))
    sequences.send(sequence(7, length=2, choice=2), (14,), scores)
    sequences.send(sequence(7, length=3, choice=2, finish=FinishReason.STOP), (15,))
    (message,) = DecodeServicer(cast(DecodeRole, role))._messages(role.box.take())
    assert list(convert.token_runs(message.tokens)) == [(7, 0, (10,)), (8, 3, (11, 12))]
    assert [list(output.token_ids) for output in message.outputs] == [[13], [14], [15]]


async def test_packed_tokens_of_a_router_that_stood_still_fit_their_messages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("decode_worker.sequences._MAX_PACKED_RUNS", 2)
    role = Role()
    for index in range(5):
        role.box.put_tokens(7, index, (index,))
    role.box.put(output(5))
    messages = list(DecodeServicer(cast(DecodeRole, role))._messages(role.box.take()))
    assert [len(message.tokens.numbers) for message in messages] == [2, 2, 1]
    assert [len(message.outputs) for message in messages] == [0, 0, 1]
    runs = [run for message in messages for run in convert.token_runs(message.tokens)]
    assert runs == [(7, index, (index,)) for index in range(5)]


# Outboxes


def output(index: int) -> TokenOutput:
    return TokenOutput("r", 0, index, (index,))


async def test_a_router_that_knows_a_full_batch_gets_a_message_when_a_place_is_free() -> None:
    sequences, role = RunningSequences("decode-0", time.monotonic), Role()
    role.sequences = SimpleNamespace(outbox=sequences.outbox)
    role.is_full = True
    stream = DecodeServicer(cast(DecodeRole, role)).StreamTokens(
        decode_pb2.StreamTokensRequest(router_id="router"), cast(Any, None)
    )
    for _ in range(2):
        await anext(stream)
    next_message = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert sequences.is_known_full
    role.is_full = False
    sequences.outbox("another")
    sequences.tell_places()
    assert (await next_message).HasField("load")
    assert not sequences.is_known_full
    await stream.aclose()


async def test_one_message_a_step() -> None:
    outbox = Outbox(0.0)
    outbox.open()
    await outbox.wait(1.0)
    assert not outbox.take()
    outbox.put(output(0))
    outbox.put(output(1))
    waiting = asyncio.create_task(outbox.wait(300.0))
    await asyncio.sleep(0)
    assert not waiting.done(), "woken before the step was over"
    outbox.flush()
    await waiting
    assert outbox.take().outputs == [output(0), output(1)]
    assert not outbox.take()


async def test_a_slow_reader_finds_several_steps_in_one_message() -> None:
    outbox = Outbox(0.0)
    for step in range(3):
        outbox.put(output(step))
        outbox.flush()
    await outbox.wait(1.0)
    assert outbox.take().outputs == [output(0), output(1), output(2)]


async def test_waiting_ends_at_its_deadline() -> None:
    outbox = Outbox(0.0)
    async with asyncio.timeout(60):
        await outbox.wait(0.001)
    outbox.flush()
    async with asyncio.timeout(60):
        await outbox.wait(0.001)
    assert not outbox.take()


async def test_one_that_hurries_has_a_message_of_nothing() -> None:
    outbox = Outbox(0.0)
    waiting = asyncio.create_task(outbox.wait(300.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.hurry()
    async with asyncio.timeout(60):
        await waiting
    assert not outbox.take()


async def test_a_new_stream_takes_the_place_of_the_old_one() -> None:
    outbox = Outbox(0.0)
    old = outbox.open()
    await outbox.wait(1.0)
    outbox.take()
    waiting = asyncio.create_task(outbox.wait(300.0))
    await asyncio.sleep(0)
    new = outbox.open()
    await waiting
    assert not outbox.is_current(old)
    assert outbox.is_current(new)
    outbox.put(output(0))
    outbox.close(old, 3.0)
    assert outbox.unread_for(9.0) == 0.0, "the old stream's end is not the router's"
    assert outbox.take().outputs == [output(0)]


async def test_it_knows_for_how_long_no_client_has_read() -> None:
    outbox = Outbox(2.0)
    assert outbox.unread_for(5.0) == 3.0
    reader = outbox.open()
    assert outbox.unread_for(5.0) == 0.0
    outbox.close(reader, 6.0)
    assert outbox.unread_for(8.0) == 2.0
    outbox.put(output(0))
    assert outbox.take().outputs == [output(0)], "what was put before is kept for the next stream"


@pytest.mark.parametrize("ticks", range(5))
async def test_a_stream_that_is_cancelled_while_it_wakes_is_cancelled(ticks: int) -> None:
    outbox = Outbox(0.0)
    waiting = asyncio.create_task(outbox.wait(300.0))
    for _ in range(5):
        await asyncio.sleep(0)
    outbox.put(output(0))
    outbox.flush()
    for _ in range(ticks):
        await asyncio.sleep(0)
    if waiting.cancel():
        with pytest.raises(asyncio.CancelledError):
            await waiting
