"""Budgets in a real Valkey: requests hold their maximum cost, and what is used up refuses."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import cast

import pytest

from baton import errors
from baton.store.redis_client import redis_client
from router.access.visit import Visit
from tests.support.integration.billing import (
    DAY,
    DEADLINE_S,
    DOLLAR,
    PROMPT,
    Cluster,
    key_of,
    until_reported,
)
from tests.support.mini_cluster import free_port, valkey


async def test_a_request_holds_its_maximum_until_its_bill(cluster: Cluster) -> None:
    router = cluster.router(key=key_of(budget=1.0))
    visit = await router.admitted(DOLLAR // 2)
    # Its hold, and the slice of this router.
    assert await router.used() == DOLLAR // 2 + DOLLAR // 100
    other = await router.admitted(DOLLAR // 2)
    with pytest.raises(errors.BudgetExceeded, match=r"key 'k' for 2026-11 has \$0 left of \$1"):
        await router.admitted(1)
    router.settle((100, 0, 10), visit=visit)
    router.settle(visit=other)
    await until_reported(router)
    spent = 100 * 1000 + 10 * 2000
    assert await router.used() == spent
    await router.admitted(DOLLAR - spent)
    with pytest.raises(errors.BudgetExceeded) as refused:
        await router.admitted(1)
    assert 0 < cast(float, refused.value.retry_after) < 31 * 86400


async def test_routers_together_never_exceed_a_budget(cluster: Cluster) -> None:
    routers = [cluster.router(key=key_of(budget=1.0)) for _ in range(4)]
    tries = [router.admitted(DOLLAR // 10) for router in routers for _ in range(10)]
    visits = await asyncio.gather(*tries, return_exceptions=True)
    admitted = [one for one in visits if isinstance(one, Visit)]
    assert all(isinstance(one, Visit | errors.BudgetExceeded) for one in visits)
    # Slices of the others may keep the last one out.
    assert 9 <= len(admitted) <= 10
    assert await routers[0].used() <= DOLLAR


async def test_what_a_dead_router_held_comes_back(cluster: Cluster) -> None:
    router = cluster.router(key=key_of(budget=1.0))
    visit = await router.limits.arrive(router.key, 0.2)
    assert visit is not None
    await router.limits.charge(visit, 1, [1], DOLLAR)
    with pytest.raises(errors.BudgetExceeded):
        await router.admitted(1)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await router.admitted(DOLLAR)
            except errors.BudgetExceeded:
                await asyncio.sleep(0.05)
            else:
                return


async def test_a_new_period_begins_with_the_whole_budget(cluster: Cluster) -> None:
    router = cluster.router(key=key_of(budget=1.0, budget_period="day"))
    before = await router.admitted(DOLLAR)
    router.now[0] += 86400
    after = await router.admitted(DOLLAR)
    # It was admitted in the period before, and costs nothing of this one.
    router.settle((100, 0, 0), visit=before)
    router.settle((7, 0, 0), visit=after)
    await until_reported(router)
    assert await router.used() == 7 * 1000


async def test_a_budget_of_a_tenant_is_one_for_all_keys(cluster: Cluster) -> None:
    keys = [key_of(), key_of(name="l", sha256=hashlib.sha256(b"l").hexdigest())]
    router = cluster.router(keys=keys, tenants=[{"name": "acme", "budget": 1.0}])
    await router.admitted(DOLLAR)
    visit = await router.limits.arrive(router.front.config.keys[1], DEADLINE_S)
    assert visit is not None
    with pytest.raises(errors.BudgetExceeded, match="tenant 'acme'"):
        await router.limits.charge(visit, 1, [1], 1)
    assert router.front.count("budget_used_ratio", tenant="acme") == 1.0


async def test_without_redis_a_router_spends_its_slice_and_then_refuses(tmp_path: Path) -> None:
    port = free_port()
    client = redis_client(f"redis://127.0.0.1:{port}/0")
    cluster = Cluster(client, tmp_path)
    with valkey(port, tmp_path):
        router = cluster.router(key=key_of(budget=1.0))
        router.settle(visit=await router.admitted(1))
        await until_reported(router)
    # 1 % of the budget.
    visits = [await router.admitted(DOLLAR // 1000) for _ in range(10)]
    with pytest.raises(errors.Unavailable, match="the budget of key 'k' cannot be checked"):
        await router.admitted(1)
    for visit in visits:
        router.settle((500, 0, 0), visit=visit)
    # What bills are lower comes back.
    visits = [await router.admitted(DOLLAR // 1000) for _ in range(5)]
    for visit in visits:
        router.settle((500, 0, 0), visit=visit)
    with valkey(port, tmp_path):
        await until_reported(router)
        assert (await cluster.sums())["cost"] == 15 * 500 * 1000
        visit = await router.admitted(1)
        # The first question may still meet a connection that is broken.
        while visit.hold.from_slices:
            router.settle(visit=visit)
            await until_reported(router)
            visit = await router.admitted(1)
        assert await router.used() == 15 * 500 * 1000 + 1 + DOLLAR // 100
        router.settle(visit=visit)
        await router.close()
    await client.aclose()


async def test_a_used_up_budget_is_429_with_openai_s_code(cluster: Cluster) -> None:
    router = cluster.router(key=key_of(budget=0.001, budget_period="total"))
    async with router.app() as http:
        answer = await http.post("/v1/completions", json=PROMPT | {"max_tokens": 500})
        assert answer.status_code == 429, answer.text
        error = answer.json()["error"]
        assert (error["code"], error["type"]) == ("insufficient_quota", "insufficient_quota")
        assert "may cost $0.001003" in error["message"]
        assert "lower max_tokens" in error["message"]
        assert (await http.post("/v1/completions", json=PROMPT)).status_code == 200
    refused = {key: value for key, value in router.front.requests().items() if key[1] == "shed"}
    assert refused == {("unknown", "shed", "insufficient_quota"): 1}


async def test_beyond_a_share_of_the_budget_requests_run_in_the_background(
    cluster: Cluster,
) -> None:
    key = key_of(budget=0.001, budget_slow_ratio=0.5, budget_period="total")
    router = cluster.router(key=key)
    async with router.app() as http:
        for max_tokens in (4, 300):
            body = PROMPT | {"max_tokens": max_tokens}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            await until_reported(router)
    asked = router.front.dispatcher.requests
    assert [one.background for one in asked] == [False, True]
    sums = await router.store.entries([DAY], None)
    assert {one.place[3] for one in sums} == {"short"}, "it is billed as what it is"
