"""Questions among routers, over a real store."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import redis.asyncio

from baton.autoscaling.traffic import RouterTraffic, TrafficCounts
from baton.autoscaling.traffic_store import TrafficStore
from baton.errors import Overloaded
from baton.store.redis_client import redis_client
from router.admin import router_questions
from router.admin.router_questions import MAX_ANSWERED, MAX_ASKING, TTL_S, Answers, RouterQuestions


@dataclass
class Cluster:
    """Routers of one cluster. A test lets each look at the questions."""

    client: redis.asyncio.Redis
    id: str

    async def router(self, name: str) -> RouterQuestions:
        """One that reports traffic, and answers with its name and the question."""
        await TrafficStore(self.client, self.id).write(name, RouterTraffic(1, TrafficCounts()))
        return RouterQuestions(
            self.client, self.id, name, lambda question: f"{name}: {question}".encode()
        )

    async def keys(self) -> set[str]:
        found = await self.client.keys(f"baton:{{{self.id}}}:*")
        return {str(key).rstrip("'").split("}:")[1] for key in found} - {"traffic"}

    async def asked(self, count: int = 1) -> None:
        """Wait until ``count`` questions are in the store."""
        async with asyncio.timeout(60):
            while await self.client.hlen(f"baton:{{{self.id}}}:questions") < count:
                await asyncio.sleep(0.01)


@pytest.fixture
async def cluster(redis_url: str) -> AsyncIterator[Cluster]:
    async with redis_client(redis_url) as client:
        yield Cluster(client, secrets.token_hex(4))


async def test_all_other_routers_answer(cluster: Cluster) -> None:
    one, two, three = [await cluster.router(name) for name in ("r1", "r2", "r3")]
    elsewhere = Cluster(cluster.client, secrets.token_hex(4))
    stranger = await elsewhere.router("r4")
    asking = asyncio.create_task(one.ask("mine"))
    await cluster.asked()
    for router in (one, stranger, two, two, three):
        await router.look()
    answers = await asking
    assert sorted(answers.texts) == [b"r2: mine", b"r3: mine"]
    assert answers.others == 2
    assert await cluster.keys() == set(), "nothing stays in the store"


async def test_one_router_alone_asks_no_other(cluster: Cluster) -> None:
    one = await cluster.router("r1")
    assert await one.ask("mine") == Answers([], 0)
    # As one does that has just started.
    new = RouterQuestions(cluster.client, secrets.token_hex(4), "r1", str.encode)
    assert await new.ask("mine") == Answers([], 0)


async def test_a_router_that_is_gone_is_waited_for_with_a_deadline(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_questions, "WAIT_S", 0.3)
    one, two = [await cluster.router(name) for name in ("r1", "r2")]
    await cluster.router("gone")
    asking = asyncio.create_task(one.ask("mine"))
    await cluster.asked()
    await two.look()
    assert await asking == Answers([b"r2: mine"], 2)
    assert await cluster.keys() == set()


async def test_questions_of_several_routers_at_once(cluster: Cluster) -> None:
    routers = [await cluster.router(name) for name in ("r1", "r2", "r3")]
    for router in routers:
        router.start()
    try:
        told = await asyncio.gather(*(one.ask("a") for one in routers), routers[0].ask("b"))
    finally:
        for router in routers:
            await router.close()
    assert [sorted(answers.texts) for answers in told] == [
        [b"r2: a", b"r3: a"],
        [b"r1: a", b"r3: a"],
        [b"r1: a", b"r2: a"],
        [b"r2: b", b"r3: b"],
    ]


async def test_questions_are_bounded(cluster: Cluster) -> None:
    one, two = [await cluster.router(name) for name in ("r1", "r2")]
    asking = [asyncio.create_task(one.ask(f"q{number}")) for number in range(MAX_ASKING)]
    await cluster.asked(MAX_ASKING)
    with pytest.raises(Overloaded):
        await one.ask("one more")
    key = f"baton:{{{cluster.id}}}:questions"
    for number in range(MAX_ANSWERED):
        await cluster.client.hset(key, f"of-another-{number}", "x")
    assert 0 < await cluster.client.ttl(key) <= TTL_S
    await two.look()
    places = await cluster.keys() - {"questions"}
    assert len(places) == MAX_ANSWERED, "it goes on with its requests in between"
    for place in places:
        assert 0 < await cluster.client.ttl(f"baton:{{{cluster.id}}}:{place}") <= TTL_S
    await two.look()
    assert {answers.texts[0] for answers in await asyncio.gather(*asking)} == {
        f"r2: q{number}".encode() for number in range(MAX_ASKING)
    }


async def test_questions_that_are_no_text_are_survived(cluster: Cluster) -> None:
    one = await cluster.router("r1")
    await cluster.client.hset(f"baton:{{{cluster.id}}}:questions", b"\xff", b"\xff")
    await one.look()
    await one.look()
