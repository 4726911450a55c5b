"""Prefill and decode workers whose KV blocks differ: in size, in type, in both."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from baton.errors import GeometryMismatch, HandoffError
from baton.hashing import block_hashes, hash_key, last_hashes
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.offline import generate
from kvtransfer.layout.layout import KvLayout
from kvtransfer.pairs.pair import Identity
from kvtransfer.transports.transport import Peer
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from worker.conversion.kv_converter import Converter
from worker.role import WorkerContext

HASH_BLOCK = 16
ANSWER = 2 * HASH_BLOCK + 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
SIZES = [
    pytest.param(16, 32, marks=pytest.mark.long),
    pytest.param(32, 16, marks=pytest.mark.long),
    (48, 32),
]
"""Of prefill and decode blocks; in the last pair neither is a multiple of the other."""
LENGTHS = (1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 95, 96, 97)
TYPES = [
    ("bfloat16", {"kv_dtype": "int8"}),
    ("bfloat16", {"kv_dtype": "fp8"}),
    ("float32", {"kv_dtype": "bfloat16"}),
    ("float32", {"kv_dtype": "int8", "block_size": 64}),
]
"""The type of the prefill worker's KV, and what the decode pool has instead."""


def prompt_of(length: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(length)
    return tuple(torch.randint(0, 250, (length,), generator=generator).tolist())


def context_of(cluster: MiniCluster, slot: str) -> WorkerContext:
    context = cluster.workers[slot].context
    assert context is not None
    return context


def block_bytes(cluster: MiniCluster) -> int:
    """Of the decode worker."""
    return context_of(cluster, "decode-0").memory.block_bytes


def landed_bytes(cluster: MiniCluster) -> float:
    """By gRPC: over shared memory a receiver would read blocks as they lie."""
    return cluster.value("decode-0", "baton_handoff_bytes_total", transport="grpc")


@pytest.mark.parametrize(("prefill", "decode"), SIZES)
async def test_blocks_of_other_sizes(
    tiny_model: Path, redis_url: str, prefill: int, decode: int
) -> None:
    """Tokens are those of one engine with the decode side's blocks; what is held is not sent."""
    pool_bytes = 8 << 20
    engine = build_engine(
        EngineSettings(tiny_model, "float32", "cpu", 1, block_size=decode, kv_pool_bytes=pool_bytes)
    )
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        prefill_pool={"block_size": prefill},
        decode_pool={"block_size": decode},
    ) as cluster:
        for length in LENGTHS:
            await check_cold_and_warm(cluster, engine, prompt_of(length))
        assert cluster.value("decode-0", "baton_computed_prompt_tokens_total") == 0
        await cluster.until_idle()


async def check_cold_and_warm(
    cluster: MiniCluster, engine: Engine, prompt: tuple[int, ...]
) -> None:
    spec = SequenceSpec("local", 0, "", prompt, len(prompt), GREEDY)
    engine.pool.drop_cache()
    expected = generate(engine, [spec])[0].token_ids
    prefill = context_of(cluster, "prefill-0").engine.cache.block_size
    decode = context_of(cluster, "decode-0").engine.cache.block_size
    sent = []
    for cached in (0, (len(prompt) - 1) // prefill * prefill):
        before = landed_bytes(cluster)
        answer = await cluster.answer(prompt, GREEDY)
        sent.append(landed_bytes(cluster) - before)
        assert (answer.token_ids, answer.finish_reason) == (expected, FinishReason.LENGTH)
        assert answer.cached_prompt_tokens == cached
    blocks, full = -(-len(prompt) // decode), len(prompt) // decode
    assert sent == [blocks * block_bytes(cluster), (blocks - full) * block_bytes(cluster)]


@pytest.mark.parametrize(("dtype", "decode_pool"), TYPES)
async def test_kv_of_other_types(
    tiny_model: Path, redis_url: str, dtype: str, decode_pool: dict[str, object]
) -> None:
    """The decode worker holds, byte for byte, what the prefill worker's blocks convert to."""
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, dtype=dtype, decode_pool=decode_pool
    ) as cluster:
        prompt = prompt_of(150)
        await check_ends_well(cluster, prompt)
        kv = held(cluster, "decode-0", prompt)
        assert kv.any()
        assert torch.equal(kv, converted(cluster, prompt))
        before = landed_bytes(cluster)
        await check_ends_well(cluster, prompt)
        assert landed_bytes(cluster) - before == block_bytes(cluster), "what is held was sent"
        await cluster.until_idle()


async def check_ends_well(cluster: MiniCluster, prompt: tuple[int, ...]) -> None:
    answer = await cluster.answer(prompt, GREEDY)
    assert (len(answer.token_ids), answer.finish_reason) == (ANSWER, FinishReason.LENGTH)


def table_of(cluster: MiniCluster, slot: str, prompt: tuple[int, ...]) -> list[int]:
    """A worker's full blocks of a prompt."""
    engine = context_of(cluster, slot).engine
    hashes = block_hashes(prompt, HASH_BLOCK, hash_key(engine.fingerprint))
    table = engine.pool.match(last_hashes(hashes, engine.cache.block_size // HASH_BLOCK))
    assert len(table) == len(prompt) // engine.cache.block_size
    return table


def held(cluster: MiniCluster, slot: str, prompt: tuple[int, ...]) -> torch.Tensor:
    """The bytes of a worker's full blocks of a prompt."""
    return context_of(cluster, slot).engine.cache.bytes[table_of(cluster, slot, prompt)]


def converted(cluster: MiniCluster, prompt: tuple[int, ...]) -> torch.Tensor:
    """What the decode worker should hold, made of what the prefill worker does."""
    source = context_of(cluster, "prefill-0").engine.cache
    target = KvLayout.of(context_of(cluster, "decode-0").engine.cache.geometry)
    table = table_of(cluster, "prefill-0", prompt)
    wanted = range(len(prompt) // target.block_size)
    out = torch.empty((len(wanted), target.block_bytes), dtype=torch.uint8)
    tokens = len(table) * source.block_size
    converter = Converter(KvLayout.of(source.geometry), target)
    converter.convert(source.bytes, table, tokens, wanted, out)
    return out


@pytest.mark.long
async def test_many_at_once(tiny_model: Path, redis_url: str) -> None:
    """With chunks that end within blocks of either side, and a window of a few blocks."""
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        chunk_tokens=40,
        max_sequences=8,
        transfer_window_mib=1,
        decode_pool={"block_size": 64},
    ) as cluster:
        prompts = [prompt_of(length) for length in range(60, 180, 10)]
        alone = [(await cluster.answer(prompt, GREEDY)).token_ids for prompt in prompts]
        for worker in ("prefill-0", "decode-0"):
            context_of(cluster, worker).engine.pool.drop_cache()
        async with asyncio.timeout(DEADLINE_S):
            together = await asyncio.gather(*(cluster.answer(p, GREEDY) for p in prompts))
        assert [answer.token_ids for answer in together] == alone
        await cluster.until_idle()


async def test_the_index_knows_every_hash_block_of_larger_blocks(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, prefill_pool={"block_size": 64}
    ) as cluster:
        prompt = prompt_of(150)
        await cluster.answer(prompt, GREEDY)
        key = hash_key(context_of(cluster, "prefill-0").engine.fingerprint)
        hashes = block_hashes(prompt, HASH_BLOCK, key)
        expected = {
            context_of(cluster, "prefill-0").incarnation: 128 // HASH_BLOCK,
            context_of(cluster, "decode-0").incarnation: 144 // HASH_BLOCK,
        }
        async with asyncio.timeout(DEADLINE_S):
            while await cluster.index.lookup(hashes) != expected:
                await asyncio.sleep(0.01)
        context_of(cluster, "prefill-0").engine.pool.drop_cache()
        del expected[context_of(cluster, "prefill-0").incarnation]
        async with asyncio.timeout(DEADLINE_S):
            while await cluster.index.lookup(hashes) != expected:
                await asyncio.sleep(0.01)


async def test_blocks_are_not_pulled_from_a_worker_with_others(
    tiny_model: Path, redis_url: str
) -> None:
    """The reader then computes; nothing stays pinned."""
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, decode_pool={"block_size": 32}
    ) as cluster:
        prompt = prompt_of(64)
        await cluster.answer(prompt, GREEDY)
        holder, reader = context_of(cluster, "decode-0"), context_of(cluster, "prefill-0")
        geometry = reader.engine.cache.geometry
        identity = Identity(reader.incarnation, reader.engine.fingerprint, geometry)
        hashes = block_hashes(prompt, HASH_BLOCK, hash_key(reader.engine.fingerprint))
        with pytest.raises(GeometryMismatch, match=r"prefill-0.*=16.*decode-0.*=32"):
            await holder.exchange.serve_pull(
                identity, peer_of(cluster, "prefill-0"), holder.incarnation, "ticket", hashes
            )
        await cluster.until_idle()


async def test_a_transport_that_sends_blocks_as_they_lie_is_refused(
    tiny_model: Path, redis_url: str
) -> None:
    """At once, with both sides named."""
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, transport="shm", decode_pool={"block_size": 32}
    ) as cluster:
        exchange = context_of(cluster, "prefill-0").exchange
        says = r"from prefill-0:\w+ to decode-0:\w+ works: shm.*block_size=16.*block_size=32"
        with pytest.raises(HandoffError, match=says):
            await exchange.outbound(peer_of(cluster, "decode-0"))


def peer_of(cluster: MiniCluster, slot: str) -> Peer:
    record = cluster.workers[slot].record
    assert record is not None
    return Peer(record.incarnation, record.address)
