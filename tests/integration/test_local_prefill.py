"""A real decode worker computes prompts itself: the answers are those of every other path."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import pytest

from baton.errors import DeadlineExceeded, HandoffError
from baton.request import SequenceSpec
from baton.rpc import convert
from baton.sampling_params import SamplingParams
from baton.store.registry import WorkerRecord
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2
from engine.scheduling.sequence import SequenceUpdate
from router.workers.worker_link import PrefillStream
from tests.support.integration.handoff import ANSWER, BLOCK, SAMPLINGS, local_answer, prompt_of
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster, worker_channel
from worker.prefill.flow import PromptUpdates

LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
ROUTER = "a-router"


async def responses_of(
    channel: grpc.aio.Channel, message: prefill_pb2.PrefillRequest
) -> list[prefill_pb2.PrefillResponse]:
    """All that a worker says of a prefill, on a stream of its own. Raises BatonError."""
    stream = PrefillStream(channel, message.decode_incarnation)
    try:
        async with asyncio.timeout(DEADLINE_S):
            return [response async for response in stream.run(message)]
    finally:
        await stream.close()


@dataclass
class Client:
    """Speaks to one decode worker as a router does, and records its messages in order."""

    record: WorkerRecord
    channel: grpc.aio.Channel
    told: list[tuple[str, int, tuple[int, ...]]] = field(default_factory=list)
    """Request, index and tokens of each output."""
    ended: dict[str, str] = field(default_factory=dict)
    """The finish reason, or the error's code, of each request that has ended."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def read(self) -> None:
        stub = decode_pb2_grpc.DecodeServiceStub(self.channel)
        request = decode_pb2.StreamTokensRequest(router_id=ROUTER)
        async for message in stub.StreamTokens(request):
            for each in message.outputs:
                output = convert.output_from_proto(each)
                self.told.append((output.request_id, output.index, output.token_ids))
                if output.finish_reason or output.error:
                    self.ended[output.request_id] = output.finish_reason or output.error_code
            self.changed.set()

    async def until(self, condition) -> None:  # type: ignore[no-untyped-def]
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    async def prefill(
        self,
        request: str,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        *,
        incarnation: str = "",
        deadline_s: float = DEADLINE_S,
    ) -> prefill_pb2.PrefillResponse:
        """The first token; it must be all that the call says."""
        spec = SequenceSpec(
            request, 0, ROUTER, prompt, len(prompt), sampling, deadline_s=deadline_s
        )
        message = prefill_pb2.PrefillRequest(
            sequence=convert.sequence_to_proto(spec),
            decode_address=self.record.address,
            decode_incarnation=incarnation or self.record.incarnation,
        )
        (response,) = await responses_of(self.channel, message)
        assert response.HasField("first_token")
        return response

    async def answer(
        self, request: str, prompt: tuple[int, ...], sampling: SamplingParams
    ) -> tuple[int, ...]:
        """All tokens of an answer, in order, by the token stream; the first by the call too."""
        response = await self.prefill(request, prompt, sampling)
        await self.until(lambda: request in self.ended)
        assert self.ended[request] == "length"
        tokens: list[int] = []
        for told, index, token_ids in self.told:
            if told == request:
                assert index == len(tokens), "out of order"
                tokens.extend(token_ids)
        assert list(response.first_token.token_ids) == tokens[:1]
        return tuple(tokens)

    def tokens_of(self, request: str) -> int:
        return sum(len(token_ids) for told, _, token_ids in self.told if told == request)


@contextlib.asynccontextmanager
async def client_of(cluster: MiniCluster, slot: str = "decode-0") -> AsyncIterator[Client]:
    record = cluster.workers[slot].record
    assert record is not None
    async with worker_channel(record.address) as channel:
        client = Client(record, channel)
        reader = asyncio.create_task(client.read())
        try:
            yield client
        finally:
            reader.cancel()
            await asyncio.wait([reader])


@pytest.mark.parametrize("kind", ["greedy", "seeded"])
async def test_the_same_tokens_as_by_a_handoff(tiny_model: Path, redis_url: str, kind: str) -> None:
    """Cold, warm and after a handoff of the same prompt; alone and with others."""
    sampling = SAMPLINGS[kind]
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster,
        client_of(cluster) as client,
    ):
        lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 2, 200)
        expected = {n: local_answer(tiny_model, prompt_of(n), sampling) for n in lengths}
        for length in lengths:
            assert (
                await client.answer(f"cold-{length}", prompt_of(length), sampling)
                == (expected[length])
            )
            by_handoff = await cluster.answer(prompt_of(length), sampling)
            assert by_handoff.token_ids == expected[length]
        at_once = await asyncio.gather(
            *(client.answer(f"warm-{n}", prompt_of(n), sampling) for n in lengths)
        )
        assert at_once == [expected[n] for n in lengths]
        warm = await client.prefill("again", prompt_of(200), replace(sampling, max_tokens=1))
        assert warm.cached_prompt_tokens == 199 // BLOCK * BLOCK
        assert warm.computed_tokens == 200 - warm.cached_prompt_tokens
        assert warm.compute_ms > 0
        assert warm.load.incarnation == client.record.incarnation
        assert cluster.value("decode-0", "baton_computed_prompt_tokens_total") >= sum(lengths)
        await cluster.until_idle()


async def test_who_decodes_goes_on_while_a_long_prompt_is_computed(
    tiny_model: Path, redis_url: str
) -> None:
    """With an SLO that leaves nothing a prompt gets the fewest tokens a step, and others theirs."""
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8, slo_tpot_s=1e-6) as cluster,
        client_of(cluster) as client,
    ):
        prompt, short = prompt_of(400), replace(LONG, max_tokens=ANSWER)
        expected = local_answer(tiny_model, prompt, short)
        runs = asyncio.create_task(client.answer("runs", prompt_of(20), LONG))
        await client.until(lambda: client.tokens_of("runs") > 3)
        answer = await client.answer("prompt", prompt, short)
        assert answer == expected
        order = [request for request, _, _ in client.told]
        before = client.told[: order.index("prompt")]
        # 400 tokens, 16 a step: as many steps, and in each a token of the one that runs.
        since_start = sum(len(token_ids) for request, _, token_ids in before if request == "runs")
        assert since_start >= 400 // 16, "the prompt held up who decodes"
        assert await runs == local_answer(tiny_model, prompt_of(20), LONG)
        load = await client.prefill("load", prompt_of(5), replace(LONG, max_tokens=1))
        assert load.load.step_ms > 0
        assert load.load.step_batch > 0
        assert load.load.step_context_tokens > 20
        await cluster.until_idle()


async def test_a_deadline_ends_a_sequence_with_its_kind(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(
            tiny_model, redis_url, kv_pool_mib=8, heartbeat_s=0.1, registry_ttl_s=4.0
        ) as cluster,
        client_of(cluster) as client,
    ):
        endless = replace(LONG, max_tokens=490)
        with contextlib.suppress(DeadlineExceeded):
            # On a slow machine the time is up before the first token is there.
            await client.prefill("short of time", prompt_of(8), endless, deadline_s=0.05)
        await client.until(lambda: "short of time" in client.ended)
        assert client.ended["short of time"] == "deadline_exceeded"
        await cluster.until_idle()


async def test_another_life_is_refused(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster,
        client_of(cluster) as client,
    ):
        with pytest.raises(HandoffError):
            await client.prefill("r", prompt_of(8), LONG, incarnation="decode-0:another")
        await cluster.until_idle()


async def test_a_worker_registers_what_its_steps_cost(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        records, _ = await cluster.registry.read()
        assert sorted(record.pool for record in records.values()) == ["decode", "prefill"]
        for record in records.values():
            for costs in (record.prefill_cost, record.step_cost):
                assert isinstance(costs, tuple)
                assert min(costs) >= 0
                assert max(costs) > 0


async def test_a_handoff_reports_what_the_transfer_added(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        source, target = (cluster.workers[f"{role}-0"].record for role in ("prefill", "decode"))
        assert source is not None
        assert target is not None
        prompt = prompt_of(64)
        spec = SequenceSpec("r", 0, ROUTER, prompt, 64, replace(LONG, max_tokens=3), deadline_s=60)
        message = prefill_pb2.PrefillRequest(
            sequence=convert.sequence_to_proto(spec),
            decode_address=target.address,
            decode_incarnation=target.incarnation,
        )
        async with worker_channel(source.address) as channel:
            first, committed = await responses_of(channel, message)
        assert (first.computed_tokens, first.cached_prompt_tokens) == (64, 0)
        assert first.compute_ms > 0
        assert first.queue_ms > 0
        assert committed.handoff.transfer_ms > 0
        await cluster.until_idle()


async def test_a_late_message_with_the_first_token_does_not_end_the_answer(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The task of a prompt may run long after the step: by then the whole answer may be there."""
    prompt = prompt_of(2 * BLOCK)
    sampling = replace(SAMPLINGS["greedy"], max_tokens=3)
    async with mini_cluster(tiny_model, redis_url, local_prefill="always") as cluster:
        take = PromptUpdates.next

        async def late(updates: PromptUpdates, timeout_s: float) -> SequenceUpdate | None:
            update = await take(updates, timeout_s)
            await cluster.until_idle()
            return update

        monkeypatch.setattr(PromptUpdates, "next", late)
        answer = await cluster.answer(prompt, sampling)
    assert answer.token_ids == local_answer(tiny_model, prompt, sampling)


async def test_a_prefill_stream_that_ends_alone_after_the_first_tokens_costs_nothing(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy resets it. The token stream, on the same connection, goes on."""
    async with mini_cluster(
        tiny_model, redis_url, prefill=0, decode=2, kv_pool_mib=8, local_prefill="auto"
    ) as cluster:
        placement = cluster.dispatcher._placement
        read, broken = PrefillStream._read, list[str]()

        async def reset(self: PrefillStream, call: Any) -> None:
            async def next_message() -> Any:
                message = await call.read()
                events = getattr(message, "events", ())
                if any(e.response.HasField("first_token") for e in events) and not broken:
                    broken.append("")
                    await cluster.until(
                        lambda: all(each.decode_began.is_set() for each in placement.attempts)
                    )
                    call.cancel()
                    return None
                return message

            await read(self, cast(Any, SimpleNamespace(read=next_message)))

        sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
        expected = await cluster.answer(prompt_of(37), sampling, salt=b"another")
        monkeypatch.setattr(PrefillStream, "_read", reset)
        for link in cluster.dispatcher.workers.all():
            await link.prefills.close()
            link.prefills = PrefillStream(link.channel, link.record.incarnation)
        async with asyncio.timeout(DEADLINE_S / 4):
            answer = await cluster.answer(prompt_of(37), sampling)
        assert broken
        assert answer.token_ids == expected.token_ids
        assert answer.cached_prompt_tokens == 0
        await cluster.until_idle()
