"""Shared by the tests of pull and by other tests."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import aclosing
from dataclasses import dataclass, replace

from baton.request import SequenceSpec
from baton.rpc import convert
from baton.sampling_params import SamplingParams
from baton.v1 import prefill_pb2
from router.workers.worker_link import PrefillStream
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, worker_channel

GREEDY = SamplingParams(temperature=0.0, max_tokens=35, ignore_eos=True)


ONE = replace(GREEDY, max_tokens=1)


@dataclass(frozen=True)
class First:
    """A prefill worker's answer to a prompt."""

    token: int
    cached: int


async def first_token(
    cluster: MiniCluster,
    slot: str,
    prompt: tuple[int, ...],
    source: prefill_pb2.PrefixSource | None = None,
) -> First:
    """Have one prefill worker compute a prompt, without a handoff."""
    record = cluster.workers[slot].record
    assert record is not None
    return await first_token_at(record.address, prompt, source)


async def first_token_at(
    address: str, prompt: tuple[int, ...], source: prefill_pb2.PrefixSource | None = None
) -> First:
    request_id = secrets.token_hex(8)
    spec = SequenceSpec(request_id, 0, "nobody", prompt, len(prompt), ONE, deadline_s=DEADLINE_S)
    message = prefill_pb2.PrefillRequest(sequence=convert.sequence_to_proto(spec), source=source)
    async with worker_channel(address) as channel:
        stream = PrefillStream(channel, "prefill")
        try:
            async with asyncio.timeout(DEADLINE_S), aclosing(stream.run(message)) as responses:
                response = await anext(responses)
                (token,) = response.first_token.token_ids
                return First(token, response.cached_prompt_tokens)
        finally:
            await stream.close()


def source_at(cluster: MiniCluster, slot: str, blocks: int) -> prefill_pb2.PrefixSource:
    record = cluster.workers[slot].record
    assert record is not None
    return prefill_pb2.PrefixSource(
        address=record.address, incarnation=record.incarnation, blocks=blocks
    )
