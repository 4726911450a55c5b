"""Several routers at decode workers without room: where requests go, and in which order.

The order of events decides, never a duration.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from baton.sampling_params import SamplingParams
from decode_worker import room_turns
from router.admission.controller import AdmissionController
from router.dispatch.dispatcher import ClusterDispatcher
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from tests.support.models import make_tiny_model
from tests.support.standing_engine import standing_engine

LOCAL: dict[str, Any] = {"prefill": 0, "local_prefill": "auto"}
REMOTE: dict[str, Any] = {"prefill": 1, "local_prefill": "never"}


class Log:
    """First tokens and ends of answers, in the order in which they came."""

    def __init__(self, cluster: MiniCluster) -> None:
        self.cluster = cluster
        self.events: list[tuple[str, str]] = []

    @property
    def begun(self) -> list[str]:
        return [name for what, name in self.events if what == "begins"]

    async def run(
        self, name: str, router: ClusterDispatcher, *, tokens: int, prompt: int = 20
    ) -> None:
        """Run a request to its end."""
        number = sum(map(ord, name))
        prompt_ids = tuple(3 + (number * 31 + n) % 300 for n in range(prompt))
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        request = self.cluster.request(prompt_ids, sampling)
        async for _ in router.generate(request):
            if name not in self.begun:
                self.events.append(("begins", name))
        self.events.append(("ends", name))

    def start(
        self, name: str, router: ClusterDispatcher, *, tokens: int, prompt: int = 20
    ) -> asyncio.Task[None]:
        return asyncio.create_task(self.run(name, router, tokens=tokens, prompt=prompt))

    async def until_begun(self, name: str) -> None:
        await self.cluster.until(lambda: name in self.begun)


def refusals(cluster: MiniCluster, slot: str = "decode-0") -> float:
    found = cluster.metrics.registry.get_sample_value(
        "baton_refused_attempts_total", {"worker": slot}
    )
    return found or 0.0


def waiting(cluster: MiniCluster) -> int:
    """Number of requests in the router's admission queue."""
    return cluster.dispatcher._queue._controller.waiting_requests


@pytest.mark.parametrize("how", [LOCAL, REMOTE], ids=["local", "remote"])
async def test_no_request_waits_at_a_full_worker_next_to_an_idle_one(
    tiny_model: Path, redis_url: str, how: dict[str, Any]
) -> None:
    """Two routers send a request each at the same moment. Often they choose the same worker."""
    async with (
        mini_cluster(
            tiny_model, redis_url, decode=2, kv_pool_mib=8, decode_pool={"max_sequences": 1}, **how
        ) as cluster,
        cluster.another_router() as other,
    ):
        for pair in range(6):
            log = Log(cluster)
            await asyncio.gather(
                log.run(f"a{pair}", cluster.dispatcher, tokens=250),
                log.run(f"b{pair}", other, tokens=250),
            )
            assert [what for what, _ in log.events[:2]] == ["begins", "begins"]
            await cluster.until_idle()


@pytest.mark.parametrize("how", [LOCAL, REMOTE], ids=["local", "remote"])
async def test_refused_requests_of_a_router_go_in_the_order_in_which_they_came(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Admission lets all in at first, as it does if other routers take the places that it saw."""
    async with (
        mini_cluster(
            tiny_model, redis_url, kv_pool_mib=8, decode_pool={"max_sequences": 1}, **how
        ) as cluster,
        cluster.another_router() as other,
    ):
        log = Log(cluster)
        held = log.start("held", other, tokens=200)
        await log.until_begun("held")
        monkeypatch.setattr(AdmissionController, "_fits", lambda *_: True)
        names = [f"w{n}" for n in range(6)]
        tasks = [held]
        with standing_engine(cluster, "decode-0", monkeypatch):
            for name in names:
                tasks.append(log.start(name, cluster.dispatcher, tokens=30))
                await asyncio.sleep(0)
            await cluster.until(lambda: waiting(cluster) == len(names))
            assert refusals(cluster) >= 1
            for n in range(3):
                tasks.append(log.start(f"x{n}", cluster.dispatcher, tokens=30))
                await asyncio.sleep(0)
            await cluster.until(lambda: waiting(cluster) == len(names) + 3)
        await asyncio.gather(*tasks)
        assert log.begun[1:] == [*names, "x0", "x1", "x2"]
        await cluster.until_idle()


async def test_routers_take_turns_at_a_full_worker(tiny_model: Path, redis_url: str) -> None:
    async with (
        mini_cluster(
            tiny_model, redis_url, kv_pool_mib=8, decode_pool={"max_sequences": 1}, **LOCAL
        ) as cluster,
        cluster.another_router() as second,
        cluster.another_router() as third,
    ):
        log = Log(cluster)
        held = log.start("held", third, tokens=300)
        await log.until_begun("held")
        routers = {"a": cluster.dispatcher, "b": second}
        tasks = [
            log.start(f"{name}{n}", router, tokens=60)
            for n in range(4)
            for name, router in routers.items()
        ]
        await asyncio.gather(held, *tasks)
        order = [name[0] for name in log.begun[1:]]
        assert sorted(log.begun[1:5], key=lambda name: name[1])[0][1] == "0"
        for at in range(len(order) - 2):
            left = set(order[at:])
            assert len(set(order[at : at + 3])) == min(2, len(left)), f"no turns: {order}"
        for name in routers:
            own = [each for each in log.begun if each[0] == name]
            assert own == sorted(own)
        await cluster.until_idle()


async def test_small_requests_do_not_starve_a_large_one(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A busy machine must not let the grant end before it is used.
    monkeypatch.setattr(room_turns, "GRANT_S", DEADLINE_S)
    """Small ones keep coming from another router. The large one needs most of the blocks."""
    async with (
        mini_cluster(
            make_tiny_model(tmp_path / "model", context=4000),
            redis_url,
            kv_pool_mib=1,
            decode_pool={"max_sequences": 8},
            **LOCAL,
        ) as cluster,
        cluster.another_router() as other,
    ):
        context = cluster.workers["decode-0"].context
        assert context is not None
        blocks, size = context.engine.pool.total, context.engine.cache.block_size
        log, over = Log(cluster), asyncio.Event()
        small = blocks * size // 10

        async def client(number: int) -> None:
            turn = 0
            while not over.is_set():
                turn += 1
                await log.run(f"s{number}.{turn}", other, tokens=20, prompt=small)

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        await cluster.until(lambda: len(log.begun) >= 8)
        large = log.start("large", cluster.dispatcher, tokens=8, prompt=blocks * size * 3 // 4)
        await cluster.until(lambda: refusals(cluster) >= 1 or large.done())
        before = len(log.begun)
        await large
        over.set()
        # Those that ran or were on their way, and one turn of their router.
        assert log.begun.index("large") - before <= 16, "more than two batches have overtaken it"
        await asyncio.gather(*clients)
        await cluster.until_idle()
