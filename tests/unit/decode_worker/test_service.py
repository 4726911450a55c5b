"""What a decode worker sends on a router's token stream."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any, cast

from baton.request import LoadSnapshot, TokenOutput
from baton.rpc.grpc_channel import MESSAGE_LIMIT
from baton.v1 import decode_pb2
from decode_worker.outbox import Outbox
from decode_worker.role import DecodeRole
from decode_worker.service import DecodeServicer
from worker.services.beats import DEFAULT_BEATS


class Role:
    """A role that only has an outbox."""

    def __init__(self) -> None:
        self.box = Outbox(0.0)
        self.clock = time.monotonic
        self.closing = False
        self.beats = DEFAULT_BEATS
        self.context = SimpleNamespace(core=SimpleNamespace(load=LoadSnapshot))

    def outbox(self, router_id: str) -> Outbox:
        return self.box

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
    role.closing = True
    role.box.hurry()
    assert [list(message.outputs) async for message in stream] in ([[]], [[], []])
