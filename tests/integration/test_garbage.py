"""Requests leave nothing behind for the garbage collector, which would hold up all others."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path

import pytest

from baton.sampling_params import SamplingParams
from tests.support.integration.handoff import prompt_of
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster

REQUESTS = 10
OWN = (
    "baton.",
    "router.",
    "worker.",
    "prefill_worker.",
    "decode_worker.",
    "engine.",
    "kvtransfer.",
)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Nothing is collected, but by the test, which keeps what it finds."""
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


def found() -> Counter[str]:
    """What the collector finds of Baton's own objects, by class."""
    gc.garbage.clear()
    gc.collect()
    names = (f"{type(one).__module__}.{type(one).__qualname__}" for one in gc.garbage)
    return Counter(name for name in names if name.startswith(OWN))


async def ask(cluster: MiniCluster, number: int, sampling: SamplingParams, most: int) -> None:
    """Read ``most`` deltas at most, and leave."""
    request = cluster.request(prompt_of(30 + number), sampling)
    relay = (lambda delta: True) if number % 2 else None
    answer = cluster.dispatcher.generate(request, relay)
    async with asyncio.timeout(DEADLINE_S), aclosing(answer) as deltas:
        async for _ in deltas:
            most -= 1
            if not most:
                return


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("local", ["never", "always"])
@pytest.mark.parametrize("most", [1, 100])
async def test_requests_leave_no_cycles(
    tiny_model: Path, redis_url: str, most: int, local: str
) -> None:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    async with mini_cluster(tiny_model, redis_url, local_prefill=local) as cluster:
        await ask(cluster, 0, sampling, most)
        await cluster.dispatcher.until_idle()
        found()
        for number in range(REQUESTS):
            await ask(cluster, number, sampling, most)
        await cluster.dispatcher.until_idle()
        await asyncio.sleep(0.2)
        left = found()
    assert {name: count for name, count in left.items() if count >= REQUESTS // 2} == {}
