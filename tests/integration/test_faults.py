"""What breaks, and what is left: nothing hangs, nothing leaks, and everything is counted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator
from pathlib import Path

import grpc
import grpc.aio
import pytest
import torch

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    DeadlineExceeded,
    GeometryMismatch,
    Overloaded,
    TicketEnded,
)
from baton.request import SequenceSpec
from baton.rpc import convert
from baton.rpc.grpc_errors import error_from_code
from baton.sampling_params import SamplingParams
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    transfer_pb2,
    transfer_pb2_grpc,
)
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.pairs.pair import seal_checksums
from kvtransfer.transports.grpc_transport import GrpcTransport
from kvtransfer.transports.in_place import ReadSendLink
from kvtransfer.transports.shm_transport import ShmCopier
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts
from router.core.request import OutputDelta
from router.workers.worker_link import PrefillStream
from tests.support.integration.faults import outcomes
from tests.support.integration.handoff import local_answer, prompt_of
from tests.support.mini_cluster import (
    DEADLINE_S,
    MiniCluster,
    mini_cluster,
    valkey,
    worker_channel,
)
from tests.support.proxy import flip_one_byte, proxy
from tests.support.standing_engine import standing_engine
from worker.exchange.handoff_calls import HandoffCalls
from worker.role import WorkerContext

Pair = grpc.aio.StreamStreamCall[transfer_pb2.TransferRequest, transfer_pb2.TransferResponse]

both = pytest.mark.parametrize("transport", ["shm", "grpc"])

LONG = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def context_of(cluster: MiniCluster, slot: str) -> WorkerContext:
    context = cluster.workers[slot].context
    assert context is not None
    return context


def reserve_request(
    cluster: MiniCluster, spec: SequenceSpec, writer: str = "a-test"
) -> decode_pb2.ReserveRequest:
    context = context_of(cluster, "decode-0")
    return decode_pb2.ReserveRequest(
        fingerprint=context.engine.fingerprint,
        geometry=convert.geometry_to_proto(context.engine.cache.geometry),
        incarnation=context.incarnation,
        writer=writer,
        sequence=convert.sequence_to_proto(spec),
    )


def spec_of(request_id: str, length: int) -> SequenceSpec:
    return SequenceSpec(request_id, 0, "nobody", prompt_of(length), length, SHORT)


@contextlib.asynccontextmanager
async def channel_to(cluster: MiniCluster, slot: str):  # type: ignore[no-untyped-def]
    record = cluster.workers[slot].record
    assert record is not None
    channel = worker_channel(record.address)
    try:
        yield channel
    finally:
        await channel.close()


@contextlib.asynccontextmanager
async def calls_over(channel: grpc.aio.Channel) -> AsyncIterator[HandoffCalls]:
    """A writer's calls."""
    calls = HandoffCalls(channel, "decode")
    try:
        yield calls
    finally:
        await calls.close()


async def reserve(
    calls: HandoffCalls, request: decode_pb2.ReserveRequest
) -> decode_pb2.ReserveResponse:
    """A ticket. Raises BatonError."""
    return (await calls.call(decode_pb2.HandoffsRequest(reserve=request), DEADLINE_S)).reserve


async def read_events(
    call: AsyncIterable[prefill_pb2.PrefillResponse], events: list[str | None]
) -> None:
    async for response in call:
        events.append(response.WhichOneof("event"))


async def prefill_error(cluster: MiniCluster, request_id: str) -> BatonError:
    """What a prefill that hands over to the decode worker fails with, before its commit."""
    record = cluster.workers["decode-0"].record
    assert record is not None
    request = prefill_pb2.PrefillRequest(
        sequence=convert.sequence_to_proto(spec_of(request_id, 40)),
        decode_address=record.address,
        decode_incarnation=record.incarnation,
    )
    async with channel_to(cluster, "prefill-0") as channel:
        stream = PrefillStream(channel, "prefill")
        events: list[str | None] = []
        with pytest.raises(BatonError) as caught:
            async with asyncio.timeout(DEADLINE_S):
                await read_events(stream.run(request), events)
        await stream.close()
    assert "handoff" not in events
    return caught.value


async def open_pair(cluster: MiniCluster, channel: grpc.aio.Channel) -> Pair:
    """The stream of a writer ``a-test``, which has the prefill worker's memory."""
    receiver, writer = context_of(cluster, "decode-0"), context_of(cluster, "prefill-0")
    pair: Pair = transfer_pb2_grpc.TransferServiceStub(channel).Transfer(timeout=60)
    hello = transfer_pb2.OpenPair(
        fingerprint=receiver.engine.fingerprint,
        geometry=convert.geometry_to_proto(receiver.engine.cache.geometry),
        writer="a-test",
        receiver=receiver.incarnation,
        offers=[
            transfer_pb2.TransportOffer(transport=each.name, offer=each.offer())
            for each in writer.exchange._transports
        ],
    )
    await pair.write(transfer_pb2.TransferRequest(open=hello))
    assert (await read(pair)).HasField("opened")
    return pair


async def read(pair: Pair) -> transfer_pb2.TransferResponse:
    """The next answer."""
    async with asyncio.timeout(DEADLINE_S):
        answer = await pair.read()
    assert isinstance(answer, transfer_pb2.TransferResponse), "the stream has ended"
    return answer


async def test_a_flipped_byte_on_the_wire_fails_the_handoff(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, transport="grpc") as cluster:
        (transport,) = context_of(cluster, "decode-0").exchange._transports
        assert isinstance(transport, GrpcTransport)
        async with proxy(transport._address, flip_one_byte(at_least=3000)) as address:
            transport._address = address
            assert isinstance(await prefill_error(cluster, "damaged"), ChecksumMismatch)
            assert (outcomes(cluster, "checksum"), outcomes(cluster, "ok")) == (1, 0)
            await cluster.until_idle()
            # The damage was the handoff's alone: the pair serves on.
            answer = await cluster.answer(prompt_of(41), SHORT)
            assert answer.token_ids == local_answer(tiny_model, prompt_of(41), SHORT)
            await cluster.until_idle()


async def test_a_block_that_changes_on_its_way_fails_the_handoff(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, transport="shm") as cluster:
        blocks = context_of(cluster, "prefill-0").engine.cache.bytes
        pack, copy = ReadSendLink.pack, ShmCopier.copy
        copied = threading.Event()

        def watched(copier: ShmCopier, batch: AnnouncedBatch) -> tuple[int, ...]:
            found = copy(copier, batch)
            copied.set()
            return found

        def damage(
            link: ReadSendLink, number: int, parts: Parts, memory: BlockMemory | None = None
        ) -> Packed:
            assert copied.wait(DEADLINE_S)
            blocks[parts.blocks[0], parts.offset + parts.length // 2] ^= 0x10
            return pack(link, number, parts, memory)

        with monkeypatch.context() as damaged:
            damaged.setattr(ShmCopier, "copy", watched)
            damaged.setattr(ReadSendLink, "pack", damage)
            assert isinstance(await prefill_error(cluster, "damaged"), ChecksumMismatch)
        assert (outcomes(cluster, "checksum"), outcomes(cluster, "ok")) == (1, 0)
        await cluster.until_idle()


async def test_a_silent_writer_loses_its_ticket(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8, lease_s=0.4, heartbeat_s=0.1) as cluster,
        channel_to(cluster, "decode-0") as channel,
        calls_over(channel) as calls,
    ):
        ticket = await reserve(calls, reserve_request(cluster, spec_of("silent", 40)))
        assert (ticket.pinned_blocks, ticket.missing_blocks) == (0, 3)
        await cluster.until(lambda: outcomes(cluster, "expired") == 1)
        await cluster.until_idle()
        # What the writer sends when it wakes is refused before it is copied.
        before = context_of(cluster, "decode-0").engine.cache.bytes.clone()
        memory = context_of(cluster, "prefill-0").memory
        late = transfer_pb2.AnnounceBatch(
            number=0,
            ticket_id=ticket.ticket_id,
            length=memory.block_bytes,
            targets=[0],
            sources=[0],
            checksums=seal_checksums(
                memory.checksum_many([0], 0, memory.block_bytes), ticket.ticket_id, [0], 0
            ),
        )
        pair = await open_pair(cluster, channel)
        await pair.write(transfer_pb2.TransferRequest(announced=[late]))
        (landed,) = (await read(pair)).landed
        assert isinstance(error_from_code(landed.code, landed.error), TicketEnded)
        assert torch.equal(context_of(cluster, "decode-0").engine.cache.bytes, before)
        pair.cancel()


async def test_heartbeats_keep_a_ticket(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8, lease_s=1.5, heartbeat_s=0.1) as cluster,
        channel_to(cluster, "decode-0") as channel,
        calls_over(channel) as calls,
    ):
        ticket = await reserve(calls, reserve_request(cluster, spec_of("alive", 40)))
        renewal = transfer_pb2.TransferRequest(
            renew=transfer_pb2.RenewLeases(ticket_ids=[ticket.ticket_id])
        )
        pair = await open_pair(cluster, channel)
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            await asyncio.sleep(0.1)  # twice the lease in all: time is what is tested
            await pair.write(renewal)
            assert not (await read(pair)).renewed.ended_ticket_ids
        abort = decode_pb2.HandoffsRequest(abort=decode_pb2.AbortRequest(request_id="alive"))
        await calls.call(abort, DEADLINE_S)
        await calls.call(abort, DEADLINE_S)
        await pair.write(renewal)
        assert list((await read(pair)).renewed.ended_ticket_ids) == [ticket.ticket_id]
        pair.cancel()
        await cluster.until_idle()


async def test_an_abort_may_overtake_its_reserve(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster,
        channel_to(cluster, "decode-0") as channel,
        calls_over(channel) as calls,
    ):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        await stub.Abort(decode_pb2.AbortRequest(request_id="early"), timeout=DEADLINE_S)
        with pytest.raises(TicketEnded):
            await reserve(calls, reserve_request(cluster, spec_of("early", 40)))
        await cluster.until_idle()


async def test_strangers_are_refused(tiny_model: Path, redis_url: str) -> None:
    """Fingerprint first, then geometry, then the incarnation; both sides are named."""
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster,
        channel_to(cluster, "decode-0") as channel,
        calls_over(channel) as calls,
    ):
        for field, value, code in (
            ("fingerprint", "another model", "handoff_fingerprint_mismatch"),
            ("incarnation", "decode-0:before", "handoff_failed"),
        ):
            request = reserve_request(cluster, spec_of("stranger", 40))
            setattr(request, field, value)
            with pytest.raises(BatonError, match=value) as caught:
                await reserve(calls, request)
            assert caught.value.code == code
        request = reserve_request(cluster, spec_of("stranger", 40))
        request.geometry.head_dim = 32
        with pytest.raises(GeometryMismatch) as different:
            await reserve(calls, request)
        assert "head_dim=32" in different.value.message
        assert "head_dim=8" in different.value.message
        await cluster.until_idle()


async def test_a_commit_waits_for_every_block(tiny_model: Path, redis_url: str) -> None:
    """To its own deadline, or the ticket's end."""
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster,
        channel_to(cluster, "decode-0") as channel,
        calls_over(channel) as calls,
    ):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        ticket = await reserve(calls, reserve_request(cluster, spec_of("hasty", 40)))
        commit = decode_pb2.HandoffsRequest(
            commit=decode_pb2.CommitRequest(ticket_id=ticket.ticket_id, writer="a-test")
        )
        with pytest.raises(DeadlineExceeded):
            await calls.call(commit, 0.2)
        assert outcomes(cluster, "ok") == 0
        waiting = calls.call(commit, DEADLINE_S)
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await stub.Abort(decode_pb2.AbortRequest(request_id="hasty"), timeout=DEADLINE_S)
        with pytest.raises(TicketEnded):
            await waiting
        assert (outcomes(cluster, "ok"), outcomes(cluster, "aborted")) == (0, 1)
        await cluster.until_idle()


@both
async def test_a_client_that_leaves_frees_both_sides(
    tiny_model: Path, redis_url: str, transport: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, transport=transport) as cluster:
        deltas = cluster.dispatcher.generate(cluster.request(prompt_of(50), LONG))
        count = 0
        async for delta in deltas:
            count += len(delta.token_ids)
            if count >= 3:
                break
        await deltas.aclose()
        await cluster.until_idle()


@both
async def test_a_client_that_leaves_during_prefill(
    tiny_model: Path, redis_url: str, transport: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, chunk_tokens=4, max_sequences=4, transport=transport
    ) as cluster:
        deltas = cluster.dispatcher.generate(cluster.request(prompt_of(400), LONG))
        waiting = asyncio.ensure_future(anext(deltas))
        await cluster.until(
            lambda: cluster.value("prefill-0", "baton_computed_prompt_tokens_total") > 0
        )
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await deltas.aclose()
        await cluster.until_idle()


async def test_blocks_run_out_and_every_answer_is_right(tiny_model: Path, redis_url: str) -> None:
    """Sixteen answers need more blocks than there are: some are preempted and computed again."""
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=1) as cluster:
        prompts = [prompt_of(60, salt) for salt in range(16)]
        answers = await asyncio.gather(*(cluster.answer(prompt, LONG) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == local_answer(tiny_model, prompt, LONG)
        assert cluster.value("decode-0", "baton_preemptions_total") > 0
        await cluster.until_idle()


@both
async def test_a_full_decode_worker_makes_prefill_wait(
    tiny_model: Path, redis_url: str, transport: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, max_sequences=2, transport=transport
    ) as cluster:
        prompts = [prompt_of(20 + salt, salt) for salt in range(7)]
        answers = await asyncio.gather(*(cluster.answer(prompt, SHORT) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == local_answer(tiny_model, prompt, SHORT)
        await cluster.until_idle()


async def test_full_queues_shed(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three prompts are all that lies at the prefill worker at a time, and one may wait."""
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, max_waiting_requests=1
    ) as cluster:
        # None of them is computed before the last one has come.
        with standing_engine(cluster, "prefill-0", monkeypatch):
            asked = [
                asyncio.create_task(cluster.answer(prompt_of(480, salt), SHORT))
                for salt in range(7)
            ]
            await cluster.until(lambda: sum(task.done() for task in asked) == 3)
        results = await asyncio.gather(*asked, return_exceptions=True)
        shed = [result for result in results if isinstance(result, Overloaded)]
        assert len(shed) == 3
        assert all(error.retry_after for error in shed)
        assert sum(isinstance(result, OutputDelta) for result in results) == 4
        await cluster.until_idle()


async def test_tenants_share_nothing(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        prompt = prompt_of(100)
        first = await cluster.answer(prompt, SHORT, salt=b"one")
        other = await cluster.answer(prompt, SHORT, salt=b"two")
        again = await cluster.answer(prompt, SHORT, salt=b"one")
        assert (first.cached_prompt_tokens, other.cached_prompt_tokens) == (0, 0)
        assert again.cached_prompt_tokens == 96
        assert first.token_ids == other.token_ids == again.token_ids


async def test_a_stop_string_ends_the_sequence_on_the_worker(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        prompt = prompt_of(40)
        whole = await cluster.answer(prompt, LONG)
        stop = whole.text[20:23]
        cut = await cluster.answer(prompt, dataclasses.replace(LONG, stop=(stop,)))
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert len(cut.token_ids) < len(whole.token_ids)
        await cluster.until_idle()


async def test_a_slow_reader_slows_no_other(tiny_model: Path, redis_url: str) -> None:
    """It gets fewer and larger deltas, and the whole answer."""
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        slow = cluster.dispatcher.generate(cluster.request(prompt_of(30), LONG))
        first = await anext(slow)
        quick = await cluster.answer(prompt_of(31), LONG)
        assert len(quick.token_ids) == LONG.max_tokens
        await cluster.until_idle()
        rest = [delta async for delta in slow]
        # The router may not have heard the last of it yet.
        assert len(rest) < LONG.max_tokens / 4
        tokens = first.token_ids + sum((delta.token_ids for delta in rest), ())
        assert tokens == local_answer(tiny_model, prompt_of(30), LONG)


@both
async def test_a_decode_worker_that_leaves_ends_its_requests(
    tiny_model: Path, redis_url: str, transport: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, transport=transport) as cluster:
        deltas = cluster.dispatcher.generate(cluster.request(prompt_of(30), LONG))
        await anext(deltas)
        await cluster.workers.pop("decode-0").stop()
        with pytest.raises(BatonError):
            async for _ in deltas:
                pass
        await cluster.until(lambda: cluster.dispatcher.health()[0] == "down")
        await cluster.start_worker(cluster.config.pools[1], "decode-0")
        await cluster.until(lambda: cluster.dispatcher.health()[0] == "ok")
        answer = await cluster.answer(prompt_of(30), SHORT)
        assert answer.token_ids == local_answer(tiny_model, prompt_of(30), SHORT)
        await cluster.until_idle()


@both
async def test_several_workers_of_each_role(
    tiny_model: Path, redis_url: str, transport: str
) -> None:
    async with mini_cluster(
        tiny_model,
        redis_url,
        prefill=2,
        decode=2,
        kv_pool_mib=8,
        transport=transport,
        policy="round_robin",
    ) as cluster:
        prompts = [prompt_of(40, salt) for salt in range(12)]
        answers = await asyncio.gather(*(cluster.answer(prompt, SHORT) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == local_answer(tiny_model, prompt, SHORT)
        for number in range(2):
            slot = f"prefill-{number}"
            assert cluster.value(slot, "baton_computed_prompt_tokens_total") > 0
            labels = {"transport": transport, "outcome": "ok"}
            assert cluster.value(f"decode-{number}", "baton_handoffs_total", **labels) > 0
        await cluster.until_idle()


async def test_redis_may_go_and_come_back_empty(tiny_model: Path) -> None:
    """Serving goes on with the last view, and the registry and index are whole again later."""
    with valkey() as url:
        async with mini_cluster(
            tiny_model, url, kv_pool_mib=8, heartbeat_s=0.1, registry_ttl_s=2.0
        ) as cluster:
            prompt = prompt_of(100)
            running = cluster.dispatcher.generate(cluster.request(prompt_of(30), LONG))
            await anext(running)
            await cluster.redis.flushall()
            answer = await cluster.answer(prompt, SHORT)
            assert answer.token_ids == local_answer(tiny_model, prompt, SHORT)
            assert [delta async for delta in running][-1].finish_reason == "length"
            async with asyncio.timeout(DEADLINE_S):
                while len(await cluster.registry.all()) < 2:
                    await asyncio.sleep(0.02)
            assert cluster.dispatcher.health() == ("ok", "")
            warm = await cluster.answer(prompt, SHORT)
            assert warm.cached_prompt_tokens == 96
            await cluster.until_idle()
