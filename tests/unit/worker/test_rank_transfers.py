"""Whole handoffs between workers of several ranks, byte by byte against the model's KV."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest

from baton.errors import BatonError, HandoffError, TicketEnded, WorkerFailed
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.reshard import plan
from kvtransfer.transports.shm_transport import ShmReceiveLink, ShmShardCopier
from tests.support.worker.ranked_worker import (
    DEADLINE_S,
    LIMITS,
    RankedWorker,
    RankProcess,
    geometry_of,
    model_kv,
    rank_blocks,
    until,
    workers,
)
from worker.exchange.rank_link import RankPush
from worker.exchange.rank_receiver import RankReceiver

CASES = [(1, 2), (2, 1), (2, 4), (4, 2), (2, 2)]
"""Ranks of writer and receiver."""
IN_FLIGHT = 32


def floor(writer: RankedWorker, receiver: RankedWorker, blocks: int) -> int:
    """The bytes that must move for the first ``blocks`` of a ticket."""
    source, target = KvLayout.of(writer.geometry), KvLayout.of(receiver.geometry)
    tokens = blocks * source.block_size
    return sum(each.length for each in plan(source, target, 0, tokens))


def pair_of(
    heads: int, ranks: tuple[int, int], transport: str, kv_dtype: str = "int8"
) -> tuple[RankedWorker, RankedWorker]:
    source, target = (geometry_of(heads, each, kv_dtype) for each in ranks)
    kv = model_kv(source, 1)
    return (
        RankedWorker("prefill-0", source, (transport,), kv),
        RankedWorker("decode-0", target, (transport,), None),
    )


@pytest.mark.parametrize(
    ("heads", "transport"), [(1, "shm"), (3, "shm"), (8, "shm"), (3, "grpc"), (2, "grpc")]
)
@pytest.mark.parametrize("ranks", CASES)
async def test_thirty_two_tickets_at_once(
    heads: int, ranks: tuple[int, int], transport: str
) -> None:
    async with workers(*pair_of(heads, ranks, transport)) as (writer, receiver):
        kv = model_kv(writer.geometry, 1)
        sources = [[each, 127 - each, 40 + each] for each in range(IN_FLIGHT)]
        done = await asyncio.gather(
            *(writer.hand_over(receiver, blocks, n) for n, blocks in enumerate(sources))
        )
        for (ticket, count), blocks in zip(done, sources, strict=True):
            assert count == ticket.expected_bytes == floor(writer, receiver, len(blocks))
            receiver.check_blocks(ticket.missing, blocks, kv)
        held = {block for ticket, _ in done for block in ticket.missing}
        for rank in receiver.ranks:
            others = [block for block in range(128) if block not in held]
            assert (rank.data[others] == 0xA5).all(), "bytes went where nobody promised them"
        registry = receiver.metrics.registry
        moved = registry.get_sample_value("baton_handoff_bytes_total", {"transport": transport})
        assert moved == sum(count for _, count in done)
        for ticket, _ in done:
            receiver.pool.release(ticket.missing)
        receiver.check_all_is_free()


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ranks", [(2, 3), (3, 4)])
async def test_layers_that_are_put_one_by_one(ranks: tuple[int, int], kv_dtype: str) -> None:
    async with workers(*pair_of(5, ranks, "shm", kv_dtype)) as (writer, receiver):
        ticket, push = await writer.begin(receiver, 4)
        for layer in range(3):
            for target in range(4):
                push.put_layers(target, 9 + target, layer, layer + 1)
        push.end()
        async with asyncio.timeout(DEADLINE_S):
            await push.done
        await until(lambda: ticket.is_complete)
        receiver.check_blocks(ticket.missing, range(9, 13), model_kv(writer.geometry, 1))


async def test_nothing_is_complete_before_every_rank_has_its_bytes() -> None:
    async with workers(*pair_of(4, (1, 2), "shm")) as (writer, receiver):
        ticket, push = await writer.begin(receiver, 2)
        push.put_layers(0, 5, 0, 3)
        await until(lambda: ticket.awaited_bytes < ticket.expected_bytes)
        with pytest.raises(HandoffError, match="1 other ranks lack bytes"):
            receiver.receiver.commit(
                ticket.ticket_id, writer.identity.incarnation, time.monotonic()
            )
        push.put_layers(1, 6, 0, 3)
        push.end()
        await push.done
        await until(lambda: ticket.is_complete)


async def test_a_rank_that_hears_late_of_the_end_fails_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The ticket may be committed by then, and closed on all ranks."""
    late: list[RankPush] = []

    def hear_late(self: RankPush) -> None:
        late.append(self)

    refused: list[str] = []
    renew = RankReceiver.renew

    def noting(self: RankReceiver, writer: str, ticket_ids: list[str], now: float) -> list[str]:
        ended = renew(self, writer, ticket_ids, now)
        refused.extend(ended)
        return ended

    monkeypatch.setattr(RankReceiver, "renew", noting)
    end = RankPush.end
    async with workers(*pair_of(4, (2, 2), "shm")) as (writer, receiver):
        ticket, push = await writer.begin(receiver, 2)
        push.put_layers(0, 5, 0, 3)
        push.put_layers(1, 6, 0, 3)
        with monkeypatch.context() as patch:
            patch.setattr(RankPush, "end", hear_late)
            push.end()
        await until(lambda: ticket.is_complete)
        receiver.receiver.commit(ticket.ticket_id, writer.identity.incarnation, time.monotonic())
        # Heartbeats renew what rank 1 takes for open.
        await until(lambda: refused)
        for each in late:
            end(each)
        async with asyncio.timeout(DEADLINE_S):
            assert await push.done == ticket.expected_bytes
        receiver.check_blocks(ticket.missing, [5, 6], model_kv(writer.geometry, 1))
        receiver.pool.release(ticket.missing)


@pytest.mark.parametrize("ranks", [(1, 2), (2, 2), (2, 3)])
async def test_a_ticket_that_is_cut_short_is_whole_once_all_ranks_have_the_rest(
    ranks: tuple[int, int],
) -> None:
    async with workers(*pair_of(6, ranks, "grpc")) as (writer, receiver):
        ticket, push = await writer.begin(receiver, 4)
        blocks = list(ticket.missing)
        for target in range(2):
            push.put_layers(target, 30 + target, 0, 3)
        push.end()
        async with asyncio.timeout(DEADLINE_S):
            await push.done
        blocks_of = receiver.receiver
        assert not ticket.is_complete
        blocks_of.shorten(ticket.ticket_id, 2)
        whole = blocks_of.whole(ticket.ticket_id)
        if whole is not None:
            async with asyncio.timeout(DEADLINE_S):
                await whole
        blocks_of.commit(ticket.ticket_id, writer.identity.incarnation, time.monotonic())
        assert ticket.missing == blocks[:2]
        receiver.check_blocks(ticket.missing, [30, 31], model_kv(writer.geometry, 1))
        receiver.pool.release(ticket.missing)
        receiver.check_all_is_free()


async def test_an_aborted_ticket_frees_its_blocks_on_all_ranks() -> None:
    async with workers(*pair_of(4, (2, 4), "grpc")) as (writer, receiver):
        ticket, push = await writer.begin(receiver, 2)
        push.put_layers(0, 5, 0, 3)
        receiver.receiver.abort(ticket.attempt, time.monotonic())
        push.put_layers(1, 6, 0, 3)
        push.end()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(TicketEnded):
                await push.done
        await until(lambda: not len(receiver.receiver.book))
        receiver.check_all_is_free()
        assert (await writer.hand_over(receiver, [1, 2], 1))[1] > 0


async def test_a_writer_that_gives_up_reads_nothing_more() -> None:
    async with workers(*pair_of(4, (4, 2), "grpc")) as (writer, receiver):
        ticket, push = await writer.begin(receiver, 2)
        push.put_layers(0, 5, 0, 3)
        push.cancel()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(TicketEnded):
                await push.done
        assert all(not server._life._pushes for server in writer.servers if server._life)
        receiver.receiver.abort(ticket.attempt, time.monotonic())
        await until(lambda: not len(receiver.receiver.book))
        receiver.check_all_is_free()


async def test_damaged_bytes_on_one_rank_end_the_ticket() -> None:
    async with workers(*pair_of(4, (1, 2), "shm")) as (writer, receiver):
        await writer.hand_over(receiver, [5])
        life = receiver.servers[0]._life
        assert life is not None
        (pair,) = life.inbound._pairs.values()
        assert isinstance(pair._link, ShmReceiveLink)
        copier = pair._link._copier
        assert isinstance(copier, ShmShardCopier)
        # As the receiver's rank 1 maps them: the writer's checksum is of other bytes.
        copier._theirs = np.zeros_like(copier._theirs)
        ticket, push = await writer.begin(receiver, 1, 1)
        push.put_layers(0, 5, 0, 3)
        push.end()
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(BatonError, match="damaged"):
                await push.done
        await until(lambda: not ticket.is_open)
        assert not ticket.is_complete


async def test_transports_without_ranks_are_refused() -> None:
    source, target = geometry_of(4, 1), geometry_of(4, 2)
    kv = model_kv(source, 1)
    writer = RankedWorker("prefill-0", source, ("shm",), kv)
    receiver = RankedWorker("decode-0", target, ("grpc",), None)
    async with workers(writer, receiver):
        with pytest.raises(HandoffError, match="no transport in common"):
            await writer.exchange.outbound(receiver.peer)
    other = RankedWorker("decode-0", replace(target, block_size=8), ("shm",), None)
    writer = RankedWorker("prefill-0", source, ("shm",), kv)
    async with workers(writer, other):
        with pytest.raises(HandoffError, match=r"block_size=4.*block_size=8"):
            await writer.exchange.outbound(other.peer)


async def test_ranks_that_are_processes() -> None:
    """Uneven shards, from two ranks to four; then one of the writer's is killed."""
    transport = "shm"
    source, target = geometry_of(3, 2), geometry_of(3, 4)
    kv = model_kv(source, 1)
    limits = replace(LIMITS, silence_s=3.0)
    async with AsyncExitStack() as stack:
        theirs = [RankProcess(target, rank, (transport,), None) for rank in (1, 2, 3)]
        ours = RankProcess(source, 1, (transport,), 1)
        for each in (*theirs, ours):
            stack.callback(each.close)
        receiver = RankedWorker("decode-0", target, (transport,), None, limits)
        writer = RankedWorker("prefill-0", source, (transport,), kv, limits)
        await receiver.start(stack, [each.address for each in theirs])
        await writer.start(stack, [ours.address])
        sources = [3, 1, 4, 1, 5]
        ticket, _ = await writer.hand_over(receiver, sources)
        for rank, process in enumerate(theirs, 1):
            found = await asyncio.to_thread(process.blocks, ticket.missing)
            assert (found == rank_blocks(target, rank, kv[sources])).all()
        ticket, push = await writer.begin(receiver, 2, 1)
        push.put_layers(0, 5, 0, 3)
        ours.signal(signal.SIGKILL)
        async with asyncio.timeout(DEADLINE_S):
            # WorkerFailed, or the receiver has missed that rank first and has ended the ticket.
            with pytest.raises(BatonError):
                await push.done
            assert writer.links is not None
            assert isinstance(await writer.links.broken, WorkerFailed)
        await until(lambda: not ticket.is_open)
        with pytest.raises(WorkerFailed):
            writer.promise(receiver, 1)


async def test_a_rank_that_stops_is_given_up_with_all_tickets() -> None:
    source, target = geometry_of(4, 1), geometry_of(4, 2)
    limits = replace(LIMITS, silence_s=3.0)
    async with AsyncExitStack() as stack:
        process = RankProcess(target, 1, ("grpc",), None)
        stack.callback(process.close)
        receiver = RankedWorker("decode-0", target, ("grpc",), None, limits)
        writer = RankedWorker("prefill-0", source, ("grpc",), model_kv(source, 1), limits)
        await receiver.start(stack, [process.address])
        await writer.start(stack)
        ticket, push = await writer.begin(receiver, 2)
        push.put_layers(0, 5, 0, 3)
        process.signal(signal.SIGSTOP)
        async with asyncio.timeout(DEADLINE_S):
            with pytest.raises(BatonError):
                await push.done
        await until(lambda: not ticket.is_open)
        assert receiver.pool.counts().quarantined == 2, "nobody knows what is copied there"
