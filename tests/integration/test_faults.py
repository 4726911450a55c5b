"""What breaks, and what is left: nothing hangs, nothing leaks, and everything is counted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterable
from pathlib import Path

import grpc
import grpc.aio
import pytest

from baton import convert
from baton.errors import BatonError, ChecksumMismatch, Overloaded, TicketEnded
from baton.grpc_channel import open_channel
from baton.grpc_errors import error_from_rpc
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from baton.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    transfer_pb2,
    transfer_pb2_grpc,
)
from kvtransfer.checksum import checksum, segment_checksum
from tests.integration.test_handoff import local_answer, prompt_of
from tests.mini_cluster import MiniCluster, mini_cluster, valkey
from tests.proxy import flip_one_byte, proxy
from worker.role import WorkerContext

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
        geometry=convert.geometry_to_proto(context.engine.cache.geometry()),
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
    channel = open_channel(record.address)
    try:
        yield channel
    finally:
        await channel.close()


async def read_events(
    call: AsyncIterable[prefill_pb2.PrefillResponse], events: list[str | None]
) -> None:
    async for response in call:
        events.append(response.WhichOneof("event"))


async def test_a_flipped_byte_on_the_wire_fails_the_handoff(
    tiny_model: Path, redis_url: str
) -> None:
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster,
        channel_to(cluster, "prefill-0") as channel,
    ):
        record = cluster.workers["decode-0"].record
        assert record is not None
        async with proxy(record.address, flip_one_byte(at_least=3000)) as address:
            request = prefill_pb2.PrefillRequest(
                sequence=convert.sequence_to_proto(spec_of("damaged", 40)),
                decode_address=address,
                decode_incarnation=record.incarnation,
            )
            call = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(request, timeout=30)
            events: list[str | None] = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_events(call, events)
        assert "handoff" not in events
        assert isinstance(error_from_rpc(caught.value, "prefill"), ChecksumMismatch)
        labels = {"transport": "grpc", "outcome": "checksum"}
        assert cluster.value("decode-0", "baton_handoffs_total", **labels) == 1
        labels["outcome"] = "ok"
        assert cluster.value("decode-0", "baton_handoffs_total", **labels) == 0
        await cluster.until_idle()


async def test_a_silent_writer_loses_its_ticket(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8, lease_s=0.4, heartbeat_s=0.1) as cluster,
        channel_to(cluster, "decode-0") as channel,
    ):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        ticket = await stub.Reserve(reserve_request(cluster, spec_of("silent", 40)), timeout=10)
        assert (ticket.pinned_blocks, ticket.missing_blocks) == (0, 3)
        labels = {"transport": "grpc", "outcome": "expired"}
        await cluster.until(
            lambda: cluster.value("decode-0", "baton_handoffs_total", **labels) == 1
        )
        await cluster.until_idle()
        # What the writer sends when it wakes is refused before it is copied.
        data = bytes(context_of(cluster, "decode-0").memory.block_bytes)
        segment = transfer_pb2.PushBlocksRequest(
            ticket_id=ticket.ticket_id,
            block_index=0,
            data=data,
            checksum=segment_checksum(checksum(data), ticket.ticket_id, 0, 0),
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await transfer_pb2_grpc.TransferServiceStub(channel).PushBlocks(
                iter([segment]), timeout=10
            )
        assert isinstance(error_from_rpc(caught.value, "decode"), TicketEnded)


async def test_heartbeats_keep_a_ticket(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8, lease_s=0.4, heartbeat_s=0.1) as cluster,
        channel_to(cluster, "decode-0") as channel,
    ):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        ticket = await stub.Reserve(reserve_request(cluster, spec_of("alive", 40)), timeout=10)
        renewal = decode_pb2.RenewLeasesRequest(writer="a-test", ticket_ids=[ticket.ticket_id])
        for _ in range(8):
            await asyncio.sleep(0.1)  # twice the lease in all: time is what is tested
            assert not (await stub.RenewLeases(renewal, timeout=10)).ended_ticket_ids
        abort = decode_pb2.AbortRequest(request_id="alive", writer="a-test")
        await stub.Abort(abort, timeout=10)
        await stub.Abort(abort, timeout=10)
        assert list((await stub.RenewLeases(renewal, timeout=10)).ended_ticket_ids) == [
            ticket.ticket_id
        ]
        await cluster.until_idle()


async def test_an_abort_may_overtake_its_reserve(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster,
        channel_to(cluster, "decode-0") as channel,
    ):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        await stub.Abort(decode_pb2.AbortRequest(request_id="early"), timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Reserve(reserve_request(cluster, spec_of("early", 40)), timeout=10)
        assert isinstance(error_from_rpc(caught.value, "decode"), TicketEnded)
        await cluster.until_idle()


async def test_strangers_are_refused(tiny_model: Path, redis_url: str) -> None:
    """Fingerprint first, then geometry, then the incarnation; both sides are named."""
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster,
        channel_to(cluster, "decode-0") as channel,
    ):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        for field, value, code in (
            ("fingerprint", "another model", "handoff_fingerprint_mismatch"),
            ("incarnation", "decode-0:before", "handoff_failed"),
        ):
            request = reserve_request(cluster, spec_of("stranger", 40))
            setattr(request, field, value)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Reserve(request, timeout=10)
            error = error_from_rpc(caught.value, "decode")
            assert error.code == code
            assert value in error.message
        request = reserve_request(cluster, spec_of("stranger", 40))
        request.geometry.head_dim = 32
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Reserve(request, timeout=10)
        error = error_from_rpc(caught.value, "decode")
        assert error.code == "handoff_geometry_mismatch"
        assert "head_dim=32" in error.message
        assert "head_dim=8" in error.message
        await cluster.until_idle()


async def test_a_commit_needs_every_block(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster,
        channel_to(cluster, "decode-0") as channel,
    ):
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        ticket = await stub.Reserve(reserve_request(cluster, spec_of("hasty", 40)), timeout=10)
        commit = decode_pb2.CommitRequest(ticket_id=ticket.ticket_id, writer="a-test")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Commit(commit, timeout=10)
        assert error_from_rpc(caught.value, "decode").code == "handoff_failed"
        await stub.Abort(decode_pb2.AbortRequest(request_id="hasty"), timeout=10)
        await cluster.until_idle()


async def test_a_client_that_leaves_frees_both_sides(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        deltas = cluster.dispatcher.generate(cluster.request(prompt_of(50), LONG))
        count = 0
        async for delta in deltas:
            count += len(delta.token_ids)
            if count >= 3:
                break
        await deltas.aclose()
        await cluster.until_idle()


async def test_a_client_that_leaves_during_prefill(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, chunk_tokens=4, max_sequences=4
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


async def test_a_full_decode_worker_makes_prefill_wait(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, max_sequences=2) as cluster:
        prompts = [prompt_of(20 + salt, salt) for salt in range(7)]
        answers = await asyncio.gather(*(cluster.answer(prompt, SHORT) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == local_answer(tiny_model, prompt, SHORT)
        await cluster.until_idle()


async def test_full_queues_shed(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, max_waiting_requests=1
    ) as cluster:
        results = await asyncio.gather(
            *(cluster.answer(prompt_of(30, salt), SHORT) for salt in range(4)),
            return_exceptions=True,
        )
        shed = [result for result in results if isinstance(result, Overloaded)]
        assert len(shed) == 3
        assert all(error.retry_after and error.retry_after >= 1 for error in shed)
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


async def test_a_slow_reader_slows_nobody(tiny_model: Path, redis_url: str) -> None:
    """It gets fewer and larger deltas, and the whole answer."""
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
        slow = cluster.dispatcher.generate(cluster.request(prompt_of(30), LONG))
        first = await anext(slow)
        quick = await cluster.answer(prompt_of(31), LONG)
        assert len(quick.token_ids) == LONG.max_tokens
        await cluster.until_idle()
        rest = [delta async for delta in slow]
        assert len(rest) <= 2
        tokens = first.token_ids + sum((delta.token_ids for delta in rest), ())
        assert tokens == local_answer(tiny_model, prompt_of(30), LONG)


async def test_a_decode_worker_that_leaves_ends_its_requests(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
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


async def test_several_workers_of_each_role(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(tiny_model, redis_url, prefill=2, decode=2, kv_pool_mib=8) as cluster:
        prompts = [prompt_of(40, salt) for salt in range(12)]
        answers = await asyncio.gather(*(cluster.answer(prompt, SHORT) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert answer.token_ids == local_answer(tiny_model, prompt, SHORT)
        for number in range(2):
            slot = f"prefill-{number}"
            assert cluster.value(slot, "baton_computed_prompt_tokens_total") > 0
            labels = {"transport": "grpc", "outcome": "ok"}
            assert cluster.value(f"decode-{number}", "baton_handoffs_total", **labels) > 0
        await cluster.until_idle()


async def test_redis_may_go_and_come_back_empty(tiny_model: Path) -> None:
    """Serving goes on with the last view, and the registry and index are whole again later."""
    with valkey() as url:
        async with mini_cluster(
            tiny_model, url, kv_pool_mib=8, heartbeat_s=0.1, registry_ttl_s=0.5, lease_s=0.5
        ) as cluster:
            prompt = prompt_of(100)
            running = cluster.dispatcher.generate(cluster.request(prompt_of(30), LONG))
            await anext(running)
            await cluster.redis.flushall()
            answer = await cluster.answer(prompt, SHORT)
            assert answer.token_ids == local_answer(tiny_model, prompt, SHORT)
            assert [delta async for delta in running][-1].finish_reason == "length"
            async with asyncio.timeout(30):
                while len(await cluster.registry.all()) < 2:
                    await asyncio.sleep(0.02)
            assert cluster.dispatcher.health() == ("ok", "")
            warm = await cluster.answer(prompt, SHORT)
            assert warm.cached_prompt_tokens == 96
            await cluster.until_idle()
