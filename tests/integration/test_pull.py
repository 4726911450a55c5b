"""The pull direction: cached blocks are fetched from their holders, and nothing depends on it.

Every prompt's answer is that of one process; what was computed and what was fetched is counted.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import pytest

from baton.errors import HandoffError
from baton.hashing import block_hashes, hash_key
from baton.v1 import prefill_pb2
from engine.scheduling.block_pool import BlockPool
from kvtransfer.transports.transport import Peer
from prefill_worker.role import PrefillRole
from tests.support.integration.handoff import BLOCK, local_answer, prompt_of
from tests.support.integration.pull import (
    GREEDY,
    ONE,
    First,
    first_token,
    first_token_at,
    source_at,
)
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from worker.prefill.fetch_estimates import FetchEstimates
from worker.role import WorkerContext

SCRIPT = Path(__file__).with_name("holder_script.py")


class Eager(FetchEstimates):
    """The named worker is asked, and has time."""

    def pays(
        self, incarnation: str, transport: str, size: int, compute_s: float, now: float
    ) -> bool:
        return True

    def deadline_s(self, incarnation: str, transport: str, size: int, compute_s: float) -> float:
        return 20.0


class Hasty(Eager):
    """The named worker is asked, and has little time."""

    def deadline_s(self, incarnation: str, transport: str, size: int, compute_s: float) -> float:
        return 0.3


class Never(Eager):
    """Computing is always faster."""

    def pays(
        self, incarnation: str, transport: str, size: int, compute_s: float, now: float
    ) -> bool:
        return False


def role_with(estimates: type[FetchEstimates]) -> Callable[[WorkerContext], PrefillRole]:
    return lambda context: PrefillRole(context, estimates())


def context_of(cluster: MiniCluster, slot: str) -> WorkerContext:
    context = cluster.workers[slot].context
    assert context is not None
    return context


def first_of(model: Path, prompt: tuple[int, ...]) -> int:
    """The first token of a prompt's answer, computed in one process."""
    (token,) = local_answer(model, prompt, ONE)
    return token


def hashes_of(cluster: MiniCluster, prompt: tuple[int, ...]) -> list[bytes]:
    fingerprint = context_of(cluster, "prefill-0").engine.fingerprint
    return block_hashes(prompt, BLOCK, hash_key(fingerprint))


async def until_index_says(
    cluster: MiniCluster, slot: str, prompt: tuple[int, ...], blocks: int
) -> None:
    """Wait until the index has all cached blocks of a worker."""
    incarnation = context_of(cluster, slot).incarnation
    async with asyncio.timeout(DEADLINE_S):
        while (await cluster.index.lookup(hashes_of(cluster, prompt))).get(incarnation) != blocks:
            await asyncio.sleep(0.01)


def computed(cluster: MiniCluster, slot: str = "prefill-0") -> float:
    return cluster.value(slot, "baton_computed_prompt_tokens_total")


def pulls(
    cluster: MiniCluster, outcome: str, *, transport: str = "shm", slot: str = "prefill-0"
) -> float:
    labels = {"transport": transport, "outcome": outcome}
    return cluster.value(slot, "baton_pulls_total", **labels)


def all_pulls(cluster: MiniCluster, slot: str = "prefill-0") -> dict[str, float]:
    """Fetches that have ended, by outcome."""
    found: dict[str, float] = {}
    for metric in context_of(cluster, slot).metrics.pulls.collect():
        for sample in metric.samples:
            if sample.name == "baton_pulls_total":
                outcome = sample.labels["outcome"]
                found[outcome] = found.get(outcome, 0) + sample.value
    return found


# What is fetched


async def test_the_next_turn_fetches_the_answer_from_the_decode_worker(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, prefill_role=role_with(Eager)
    ) as cluster:
        prompt = prompt_of(40)
        turns = 3
        held = 0
        for turn in range(turns):
            before = computed(cluster)
            answer = await cluster.answer(prompt, GREEDY)
            assert answer.token_ids == local_answer(tiny_model, prompt, GREEDY)
            assert answer.cached_prompt_tokens == held * BLOCK
            assert computed(cluster) - before == len(prompt) - held * BLOCK
            assert all_pulls(cluster) == ({"ok": turn} if turn else {})
            conversation = prompt + answer.token_ids
            # The last token's KV was never computed.
            held = (len(conversation) - 1) // BLOCK
            await until_index_says(cluster, "decode-0", conversation, held)
            prompt = conversation + prompt_of(20, salt=turn)
        assert pulls(cluster, "ok") == turns - 1
        # Each time what the prefill worker lacked: blocks of the answer, and the prompt's last.
        assert cluster.value("prefill-0", "baton_pulled_blocks_total", transport="shm") == 5
        assert cluster.value("decode-0", "baton_computed_prompt_tokens_total") == 0
        labels = {"transport": "shm", "outcome": "ok"}
        assert cluster.value("prefill-0", "baton_handoffs_total", **labels) == 0
        await cluster.until_idle()


async def test_where_computing_is_faster_nothing_is_fetched(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, prefill_role=role_with(Never)
    ) as cluster:
        prompt = prompt_of(40)
        answer = await cluster.answer(prompt, GREEDY)
        conversation = prompt + answer.token_ids
        await until_index_says(cluster, "decode-0", conversation, 4)
        prompt = conversation + prompt_of(20)
        answer = await cluster.answer(prompt, GREEDY)
        assert answer.token_ids == local_answer(tiny_model, prompt, GREEDY)
        assert answer.cached_prompt_tokens == 2 * BLOCK
        assert all_pulls(cluster) == {}
        await cluster.until_idle()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_one_prefill_worker_fetches_from_another(
    tiny_model: Path, redis_url: str, transport: str
) -> None:
    """Its own leading blocks stay, and the last token is computed though its block is held."""
    async with mini_cluster(
        tiny_model,
        redis_url,
        prefill=2,
        kv_pool_mib=8,
        transport=transport,
        prefill_role=role_with(Eager),
    ) as cluster:
        prompt = prompt_of(5 * BLOCK)
        expected = first_of(tiny_model, prompt)
        await first_token(cluster, "prefill-0", prompt)
        await first_token(cluster, "prefill-1", prompt[: 2 * BLOCK])
        before = computed(cluster, "prefill-1")
        source = source_at(cluster, "prefill-0", 5)
        assert await first_token(cluster, "prefill-1", prompt, source) == First(expected, 64)
        assert computed(cluster, "prefill-1") - before == BLOCK
        assert pulls(cluster, "ok", transport=transport, slot="prefill-1") == 1
        pulled = cluster.value("prefill-1", "baton_pulled_blocks_total", transport=transport)
        assert pulled == 2
        # What was fetched is cached here from now on, and published.
        await until_index_says(cluster, "prefill-1", prompt, 5)
        assert await first_token(cluster, "prefill-1", prompt, source) == First(expected, 64)
        assert all_pulls(cluster, "prefill-1") == {"ok": 1}
        await cluster.until_idle()


@pytest.mark.parametrize(
    ("reader_tp", "holder_tp"),
    [
        (2, 1),
        *(pytest.param(*degrees, marks=pytest.mark.long) for degrees in [(2, 2), (1, 2), (2, 3)]),
    ],
)
async def test_a_worker_of_several_ranks_fetches_and_is_asked(
    tiny_model: Path, redis_url: str, reader_tp: int, holder_tp: int
) -> None:
    """Each rank gets the heads that it has; the tokens are those of one rank."""
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        prefill_role=role_with(Eager),
        prefill_pool={"tp": reader_tp},
        decode_pool={"tp": holder_tp},
    ) as cluster:
        prompt = prompt_of(40)
        answer = await cluster.answer(prompt, GREEDY)
        conversation = prompt + answer.token_ids
        held = (len(conversation) - 1) // BLOCK
        await until_index_says(cluster, "decode-0", conversation, held)
        before = computed(cluster)
        prompt = conversation + prompt_of(20)
        answer = await cluster.answer(prompt, GREEDY)
        assert answer.token_ids == local_answer(tiny_model, prompt, GREEDY)
        assert answer.cached_prompt_tokens == held * BLOCK
        assert computed(cluster) - before == len(prompt) - held * BLOCK
        assert all_pulls(cluster) == {"ok": 1}
        await cluster.until_idle()


async def test_equal_prompts_that_fetch_at_once_keep_one_copy(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, kv_pool_mib=8, prefill_role=role_with(Eager)
    ) as cluster:
        prompt = prompt_of(100)
        expected = first_of(tiny_model, prompt)
        await first_token(cluster, "prefill-0", prompt)
        source = source_at(cluster, "prefill-0", 6)
        asked = [first_token(cluster, "prefill-1", prompt, source) for _ in range(4)]
        assert {answer.token for answer in await asyncio.gather(*asked)} == {expected}
        await cluster.until_idle()
        assert context_of(cluster, "prefill-1").engine.pool.counts().cached == 6


# What a holder does not have


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize(("left", "outcome"), [(0, "empty"), (3, "ok")])
async def test_what_was_evicted_in_between_is_computed(
    tiny_model: Path, redis_url: str, left: int, outcome: str, tp: int
) -> None:
    async with mini_cluster(
        tiny_model,
        redis_url,
        prefill=2,
        kv_pool_mib=8,
        prefill_role=role_with(Eager),
        prefill_pool={"tp": tp},
    ) as cluster:
        prompt = prompt_of(100)
        await first_token(cluster, "prefill-0", prompt)
        keep_leading(context_of(cluster, "prefill-0").engine.pool, hashes_of(cluster, prompt), left)
        source = source_at(cluster, "prefill-0", 6)
        answer = await first_token(cluster, "prefill-1", prompt, source)
        assert answer == First(first_of(tiny_model, prompt), left * BLOCK)
        assert computed(cluster, "prefill-1") == 100 - left * BLOCK
        assert all_pulls(cluster, "prefill-1") == {outcome: 1}
        await cluster.until_idle()


def keep_leading(pool: BlockPool, hashes: list[bytes], count: int) -> None:
    """Evict everything but the first blocks of a prompt."""
    kept = pool.match(hashes[:count])
    pool.pin(kept)
    pool.drop_cache()
    pool.release(kept)


async def test_another_life_of_the_holder_refuses(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, kv_pool_mib=8, prefill_role=role_with(Eager)
    ) as cluster:
        prompt = prompt_of(100)
        await first_token(cluster, "prefill-0", prompt)
        source = source_at(cluster, "prefill-0", 6)
        source.incarnation = "prefill-0:before"
        answer = await first_token(cluster, "prefill-1", prompt, source)
        assert answer == First(first_of(tiny_model, prompt), 0)
        assert all_pulls(cluster, "prefill-1") == {"error": 1}
        await cluster.until_idle()


async def test_the_holder_is_gone(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, kv_pool_mib=8, prefill_role=role_with(Eager)
    ) as cluster:
        prompt = prompt_of(100)
        source = source_at(cluster, "prefill-0", 6)
        await cluster.workers.pop("prefill-0").stop()
        answer = await first_token(cluster, "prefill-1", prompt, source)
        assert answer == First(first_of(tiny_model, prompt), 0)
        assert all_pulls(cluster, "prefill-1") == {"error": 1}
        await cluster.until_idle()


async def test_a_worker_named_as_its_own_source_computes(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, prefill_role=role_with(Eager)
    ) as cluster:
        prompt = prompt_of(100)
        source = source_at(cluster, "prefill-0", 6)
        answer = await first_token(cluster, "prefill-0", prompt, source)
        assert answer == First(first_of(tiny_model, prompt), 0)
        assert all_pulls(cluster) == {}


# What breaks in the middle


def break_after_one_block(context: WorkerContext, then: Callable[[], None]) -> None:
    """A holder that sends one block, does ``then``, and sends no more."""
    exchange = context.exchange

    async def push_blocks(peer: Peer, ticket_id: str, blocks: list[int]) -> None:
        pair = await exchange.outbound(peer)
        push = pair.push(ticket_id)
        try:
            push.put(0, blocks[0], 0, context.memory.block_bytes)
            then()
            await asyncio.shield(push.done)
        finally:
            push.cancel()
            await asyncio.wait([push.done])

    exchange._push_blocks = push_blocks  # type: ignore[method-assign,assignment]


def refuse() -> None:
    raise HandoffError("a test does not want to")


@pytest.mark.parametrize(
    ("then", "outcome"), [(lambda: None, "deadline"), (refuse, "error")], ids=["stops", "refuses"]
)
async def test_a_holder_that_gives_up_in_the_middle(
    tiny_model: Path, redis_url: str, then: Callable[[], None], outcome: str
) -> None:
    # A refusal may take longer to come than a hurry lasts.
    estimates = Hasty if outcome == "deadline" else Eager
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, kv_pool_mib=8, prefill_role=role_with(estimates)
    ) as cluster:
        prompt = prompt_of(100)
        await first_token(cluster, "prefill-0", prompt)
        break_after_one_block(context_of(cluster, "prefill-0"), then)
        answer = await first_token(cluster, "prefill-1", prompt, source_at(cluster, "prefill-0", 6))
        assert answer == First(first_of(tiny_model, prompt), 0)
        assert computed(cluster, "prefill-1") == 100
        assert all_pulls(cluster, "prefill-1") == {outcome: 1}
        await cluster.until_idle()


async def test_a_reader_that_leaves_in_the_middle_leaks_nothing(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, prefill_role=role_with(Eager)
    ) as cluster:
        prompt = prompt_of(40)
        answer = await cluster.answer(prompt, GREEDY)
        conversation = prompt + answer.token_ids
        await until_index_says(cluster, "decode-0", conversation, 4)
        asked = asyncio.Event()
        break_after_one_block(context_of(cluster, "decode-0"), asked.set)
        async with aclosing(
            cluster.dispatcher.generate(cluster.request(conversation + prompt_of(20), GREEDY))
        ) as deltas:
            waiting = asyncio.ensure_future(anext(deltas))
            async with asyncio.timeout(DEADLINE_S):
                await asked.wait()
            assert context_of(cluster, "prefill-0").engine.pool.counts().used > 0
            assert context_of(cluster, "decode-0").engine.pool.counts().used > 0
            waiting.cancel()
            await asyncio.wait([waiting])
        await cluster.until_idle()
        assert all_pulls(cluster) == {"aborted": 1}


async def test_without_room_for_the_blocks_the_prompt_waits_in_line(
    tiny_model: Path, redis_url: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, kv_pool_mib=8, prefill_role=role_with(Eager)
    ) as cluster:
        prompt = prompt_of(100)
        await first_token(cluster, "prefill-0", prompt)
        pool = context_of(cluster, "prefill-1").engine.pool
        taken = pool.allocate(pool.available - 3)
        source = source_at(cluster, "prefill-0", 6)
        asked = asyncio.ensure_future(first_token(cluster, "prefill-1", prompt, source))
        await cluster.until(lambda: all_pulls(cluster, "prefill-1") == {"no_room": 1})
        pool.release(taken)
        async with asyncio.timeout(DEADLINE_S):
            assert await asked == First(first_of(tiny_model, prompt), 0)
        await cluster.until_idle()


# Real processes


@asynccontextmanager
async def holder_process(
    cluster: MiniCluster, signal_name: str
) -> AsyncIterator[prefill_pb2.PrefixSource]:
    """A prefill worker in a process of its own, which sends itself a signal in the middle."""
    settings = {
        "config": cluster.config.model_dump(mode="json"),
        "model_path": str(cluster.model),
        "redis_url": cluster.redis_url,
        # No router knows it: a worker that hangs is given requests for a while.
        "cluster_id": f"{cluster.cluster_id}-holder",
        "signal": signal_name,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(SCRIPT), json.dumps(settings), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        async with asyncio.timeout(DEADLINE_S):
            line = await process.stdout.readline()
        yield prefill_pb2.PrefixSource(**json.loads(line), blocks=6)
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        async with asyncio.timeout(DEADLINE_S):
            await process.communicate()


@pytest.mark.parametrize("transport", ["shm", pytest.param("grpc", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("signal_name", "outcome"), [("SIGKILL", "error"), ("SIGSTOP", "deadline")]
)
async def test_a_holder_that_dies_or_hangs_in_the_middle(
    tiny_model: Path, redis_url: str, transport: str, signal_name: str, outcome: str
) -> None:
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        transport=transport,
        prefill_role=role_with(Hasty if signal_name == "SIGSTOP" else Eager),
    ) as cluster:
        prompt = prompt_of(100)
        expected = First(first_of(tiny_model, prompt), 0)
        async with holder_process(cluster, signal_name) as source:
            assert await first_token_at(source.address, prompt) == expected
            assert await first_token(cluster, "prefill-0", prompt, source) == expected
            assert all_pulls(cluster) == {outcome: 1}
            # Whole again while the holder is still as it is.
            await cluster.until_idle()
            answer = await cluster.answer(prompt, GREEDY)
            assert answer.token_ids == local_answer(tiny_model, prompt, GREEDY)
            await cluster.until_idle()
