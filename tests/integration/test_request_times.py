"""The parts of TTFT and of the second token add up, over real workers, however a request went."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from baton.telemetry.metrics import SECOND_TOKEN_PARTS, TTFT_PARTS
from router.core.accounting import RequestRecorder, Slo
from router.core.request import GenerationRequest
from router.core.timeline import Timeline
from tests.support.integration.handoff import prompt_of
from tests.support.integration.moves import moved
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, collect, mini_cluster
from tests.support.standing_engine import standing_engine

CLASS = "short"
SAMPLING = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


async def run(cluster: MiniCluster, request: GenerationRequest) -> Timeline:
    """Answer a request as the service does, and record it."""
    recorder = RequestRecorder(cluster.stats, Slo(2.0, 0.1), request, CLASS, time.monotonic())
    request = replace(request, timeline=recorder.timeline)
    left = request.choices
    async with (
        asyncio.timeout(DEADLINE_S),
        aclosing(cluster.dispatcher.generate(request)) as deltas,
    ):
        async for delta in deltas:
            now = time.monotonic()
            recorder.delta(delta, now)
            left -= delta.finish_reason is not None
            if not left:
                recorder.succeed(now)
                break
    return recorder.timeline


async def run_all(cluster: MiniCluster, prompts: Sequence[int]) -> list[Timeline]:
    return await asyncio.gather(
        *(
            run(cluster, cluster.request(prompt_of(tokens, seed), SAMPLING))
            for seed, tokens in enumerate(prompts)
        )
    )


def sums(cluster: MiniCluster, name: str, parts: Sequence[str]) -> dict[str, float]:
    """The sum of each part; all must have been observed equally often."""
    counts, found = set(), {}
    for part in parts:
        labels = {"class": CLASS, "part": part}
        counts.add(cluster.metrics.registry.get_sample_value(f"{name}_count", labels))
        value = cluster.metrics.registry.get_sample_value(f"{name}_sum", labels)
        assert value is not None
        found[part] = value
    assert len(counts) == 1
    return found


def check(cluster: MiniCluster, timelines: Sequence[Timeline]) -> dict[str, float]:
    """The histograms add up. Returns the sums of the parts of TTFT."""
    value = cluster.metrics.registry.get_sample_value
    ttft = value("baton_time_to_first_token_seconds_sum", {"class": CLASS})
    count = value("baton_time_to_first_token_seconds_count", {"class": CLASS})
    parts = sums(cluster, "baton_ttft_part_seconds", TTFT_PARTS)
    assert count == len(timelines)
    labels = {"class": CLASS, "part": "other"}
    assert value("baton_ttft_part_seconds_count", labels) == count
    assert sum(parts.values()) == pytest.approx(ttft, rel=1e-9)
    second = sums(cluster, "baton_second_token_part_seconds", SECOND_TOKEN_PARTS)
    gaps = [one.second_at - one.first_at for one in timelines if one.second_at and one.first_at]
    assert len(gaps) == len(timelines)
    assert sum(second.values()) == pytest.approx(sum(gaps), rel=1e-9)
    assert all(one.is_first_told and one.is_second_told for one in timelines)
    return parts


async def test_a_handoff(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, chunk_tokens=16, max_sequences=8
    ) as cluster:
        timelines = await run_all(cluster, [300, 200, 100])
        parts = check(cluster, timelines)
        assert parts["lost"] == 0
        assert min(parts["router"], parts["reserve"], parts["compute"]) > 0
        assert parts["other"] < sum(parts.values()) / 2, "most of it is known"
        for one in timelines:
            (attempt,) = one.attempts
            assert (attempt.prefill_worker, attempt.decode_worker) == ("prefill-0", "decode-0")
            assert attempt.is_handed_off
            assert attempt.computed_tokens > 0
            assert attempt.steps_s >= attempt.own_steps_s > 0
            assert attempt.queue_s >= attempt.reserve_s + attempt.fetch_s


async def test_a_prompt_that_a_decode_worker_computes(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(
        tiny_model,
        redis_url,
        kv_pool_mib=8,
        chunk_tokens=16,
        max_sequences=8,
        local_prefill="always",
    ) as cluster:
        timelines = await run_all(cluster, [300, 100])
        parts = check(cluster, timelines)
        assert parts["compute"] > 0
        assert parts["lost"] == 0
        assert all(one.attempts[0].is_local for one in timelines)
        assert all(one.second_token_parts()["transfer"] == 0 for one in timelines)


async def test_a_wait_for_room_at_the_decode_worker_is_time_to_reserve(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        mini_cluster(
            tiny_model, redis_url, kv_pool_mib=8, decode_pool={"max_sequences": 1}
        ) as cluster,
        cluster.another_router() as other,
    ):
        with standing_engine(cluster, "decode-0", monkeypatch):
            holds = asyncio.create_task(
                collect(other.generate(cluster.request(prompt_of(40, 1), SAMPLING)))
            )
            await cluster.until(lambda: cluster.value("decode-0", "baton_kv_blocks", state="used"))
            waits = asyncio.create_task(run(cluster, cluster.request(prompt_of(40, 2), SAMPLING)))
            # Far longer than the second request needs to reach the decode worker.
            await asyncio.sleep(1.5)
        await holds
        parts = check(cluster, [await waits])
        assert parts["reserve"] > parts["compute"]
        assert parts["lost"] == 0


async def test_a_lost_attempt(tiny_model: Path, redis_url: str) -> None:
    async with mini_cluster(
        tiny_model,
        redis_url,
        prefill=2,
        kv_pool_mib=8,
        chunk_tokens=4,
        max_sequences=4,
        policy="round_robin",
    ) as cluster:
        tasks = [
            asyncio.create_task(run(cluster, cluster.request(prompt_of(400, seed), SAMPLING)))
            for seed in range(4)
        ]
        await cluster.until(
            lambda: cluster.value("prefill-0", "baton_computed_prompt_tokens_total") > 0
        )
        await cluster.workers.pop("prefill-0").stop()
        timelines = await asyncio.gather(*tasks)
        assert moved(cluster, "prefill_failed") + moved(cluster, "handoff_failed") >= 1
        parts = check(cluster, timelines)
        assert parts["lost"] > 0
        again = [one for one in timelines if len(one.attempts) > 1]
        for one in again:
            first, *_, last = one.attempts
            assert (first.prefill_worker, last.prefill_worker) == ("prefill-0", "prefill-1")
            assert first.ended_by == one.attempts[1].migration != ""
            assert one.winner is last
