"""Bills, from the end of a request to the sums in a real Valkey: once, and as the client got it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import redis
import redis.asyncio

from baton import errors
from baton.store.redis_client import redis_client
from router.billing import ledger as ledgers
from router.billing import ledger_scripts
from router.billing.bill import usage_key
from router.core import script_queue
from router.core.request import GenerationRequest, OutputDelta
from tests.support.integration.billing import (
    DAY,
    DEADLINE_S,
    DOLLAR,
    NOW,
    PROMPT,
    WHO,
    Cluster,
    bills,
    key_of,
    until_reported,
)
from tests.support.mini_cluster import free_port, valkey


async def test_bills_are_added_up_by_tenant_and_class(cluster: Cluster) -> None:
    router = cluster.router()
    router.settle((10, 4, 5), agent="writer", fingerprint="f")
    router.settle((1, 0, 1), (2, 0, 2), agent="writer", fingerprint="f")
    router.settle((1, 0, 1), fingerprint="g")
    await router.close()
    entries = await router.store.entries([DAY], None)
    of_writer = {one.measure: one.amount for one in entries if one.place[4] == "writer"}
    assert of_writer == {
        "requests": 3,
        "input_tokens": 13,
        "cached_input_tokens": 4,
        "output_tokens": 8,
        "cost": 9 * 1000 + 4 * 500 + 8 * 2000,
    }
    assert {one.place for one in entries} == {
        (DAY, "acme", "k", "short", "writer", "f"),
        (DAY, "acme", "k", "short", "", "g"),
    }
    assert await router.store.entries([DAY], "other") == []
    assert bills(cluster.folder) == [], "Redis has all of it"


async def test_a_journal_of_an_older_router_is_reported(cluster: Cluster) -> None:
    """Its bills name no fingerprint, and neither do its sums."""
    folder = cluster.folder / "bills"
    folder.mkdir()
    bill = [1, "cmpl-1", "acme", "k", "", int(NOW), "", [], [["short", 1, 10, 4, 5, 7]]]
    old = folder / f"{cluster.id}.0123.bills"
    old.write_bytes(json.dumps(bill).encode() + b"\n")
    router = cluster.router()
    field = json.dumps(["acme", "k", "short", "", "r"], separators=(",", ":"))
    await router.client.hset(usage_key(f"baton:{{{cluster.id}}}", DAY), field, 2)
    async with asyncio.timeout(DEADLINE_S):
        while old.exists():
            await asyncio.sleep(0.01)
    entries = await router.store.entries([DAY], None)
    requests = [one for one in entries if one.measure == "requests"]
    assert {one.place for one in entries} == {(DAY, "acme", "k", "short", "", "")}
    assert sum(one.amount for one in requests) == 3


async def test_a_bill_whose_answer_is_lost_counts_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis has added it up, and the router cannot know."""
    call, lost = script_queue.call_together, []

    async def lossy(*args: Any) -> list[Any]:
        answers = await call(*args)
        lost.append(answers)
        if len(lost) % 2:
            raise redis.ConnectionError("reset")
        return answers

    monkeypatch.setattr(ledgers, "call_together", lossy)
    router = cluster.router()
    for _ in range(5):
        router.settle((1, 0, 1))
        await until_reported(router)
    assert (await cluster.sums())["requests"] == 5
    assert len(lost) > 5


async def test_the_bills_of_a_router_that_died_are_reported_by_the_next_one(
    cluster: Cluster,
) -> None:
    dead = cluster.router()
    dead.settle((1, 0, 1))
    await until_reported(dead)
    assert dead.ledger._reporting is not None
    dead.ledger._reporting.cancel()
    for _ in range(3):
        dead.settle((1, 0, 1))
    await dead.die()
    cluster.routers.remove(dead)
    assert len(bills(cluster.folder)) == 1
    following = cluster.router()
    async with asyncio.timeout(DEADLINE_S):
        while bills(cluster.folder):
            await asyncio.sleep(0.01)
    assert (await cluster.sums())["requests"] == 4
    following.settle((1, 0, 1))
    await until_reported(following)
    await following.close()
    # Nothing of a process stays: no more bills can come of it.
    assert not await cluster.client.keys("*:usage:writer:*")


async def test_a_journal_that_cannot_be_read_holds_back_no_other_bills(cluster: Cluster) -> None:
    folder = cluster.folder / "bills"
    folder.mkdir()
    odd = folder / f"{cluster.id}.0dd.bills"
    odd.write_text("[1, of another version]\n")
    dead = cluster.router()
    await dead.die()
    dead.settle((1, 0, 1))
    await dead.die()
    cluster.routers.remove(dead)
    router = cluster.router()
    router.settle((1, 0, 1))
    await until_reported(router)
    assert (await cluster.sums())["requests"] == 2
    await router.close()
    assert bills(cluster.folder) == [odd]


async def test_bills_wait_for_redis(client: redis.asyncio.Redis, tmp_path: Path) -> None:
    port = free_port()
    away = redis_client(f"redis://127.0.0.1:{port}/0")
    cluster = Cluster(away, tmp_path)
    router = cluster.router()
    for _ in range(300):
        router.settle((1, 0, 1))
    await asyncio.sleep(0.1)
    assert router.ledger._settled == 0
    with valkey(port):
        await until_reported(router)
        assert (await cluster.sums())["requests"] == 300
        await router.close()
    await away.aclose()


async def test_a_redis_that_has_lost_its_data_takes_further_bills(
    cluster: Cluster, client: redis.asyncio.Redis
) -> None:
    router = cluster.router()
    router.settle((1, 0, 1))
    await until_reported(router)
    names = await client.keys(f"*{cluster.id}*")
    for name in names:
        assert await client.pttl(name) > 0, name
    await client.delete(*names)
    router.settle((1, 0, 1))
    await until_reported(router)
    assert (await cluster.sums())["requests"] == 1


async def test_agents_are_bounded(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ledger_scripts.SETTLE.replace(f">= {ledger_scripts.MAX_AGENTS}", ">= 2")
    assert few != ledger_scripts.SETTLE
    monkeypatch.setattr(ledgers, "SETTLE", few)
    router = cluster.router()
    for agent in ("a", "b", "c", "a", "d", 'ü/\\"'):
        router.settle((1, 0, 1), agent=agent)
        await until_reported(router)
    entries = await router.store.entries([DAY], None)
    requests = {one.place[4]: one.amount for one in entries if one.measure == "requests"}
    assert requests == {"a": 2, "b": 1, ledger_scripts.OTHER_AGENTS: 3}


async def failing(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    yield OutputDelta("x", (65,), None)
    raise errors.WorkerFailed("it died")


@pytest.mark.parametrize("stream", [False, True])
async def test_the_bill_is_the_usage_that_the_client_got(cluster: Cluster, stream: bool) -> None:
    router = cluster.router(key=key_of(budget=1.0))
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    body = {**PROMPT, "n": 3, "metadata": {"agent": "writer", "run_id": "r1"}, **options}
    async with router.app() as http:
        answer = await http.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        if stream:
            events = answer.text.split("\n\n")
            usage = json.loads(events[-3].removeprefix("data: "))["usage"]
        else:
            usage = answer.json()["usage"]
        await router.ledger.close()
        report = (await http.get("/v1/usage", params={"by": "agent,key"})).json()
    (row,) = report["data"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert usage["completion_tokens"] == 12
    assert (row["agent"], row["key"], row["requests"]) == ("writer", "k", 1)
    assert row["input_tokens"] == usage["prompt_tokens"]
    assert row["cached_input_tokens"] == cached == 1
    assert row["output_tokens"] == usage["completion_tokens"]
    cost = (usage["prompt_tokens"] - cached) * 1000 + cached * 500 + 12 * 2000
    assert row["cost"] == f"{cost / 1e9:.10f}".rstrip("0")
    (budget,) = report["budgets"]
    assert (budget["kind"], budget["limit"], budget["state"]) == ("key", "1", "ok")
    costs = [
        router.front.count("cost_dollars_total", tenant="acme", kind=kind, **{"class": "short"})
        for kind in ("input", "cached_input", "output")
    ]
    assert sum(costs) == pytest.approx(cost / 1e9)


async def test_what_fails_by_the_server_s_fault_is_not_billed(cluster: Cluster) -> None:
    router = cluster.router(failing, key=key_of(budget=1.0))
    async with router.app() as http:
        answer = await http.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 503
        await router.ledger.close()
    assert await cluster.sums() == {}
    assert await router.used() == DOLLAR // 100, "the router's slice alone is held"


async def test_a_client_that_leaves_pays_for_what_it_got(cluster: Cluster) -> None:
    async def endless(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        while True:
            yield OutputDelta("x", (65,), None)
            await asyncio.sleep(0.001)

    router = cluster.router(endless)
    request = GenerationRequest("r", (1, 2), cast(Any, SimpleNamespace(max_tokens=9)), WHO, 60.0)
    choices = [
        SimpleNamespace(
            begun=True, prompt_tokens=2, cached_tokens=0, completion_tokens=5, fingerprint="f"
        )
    ]
    caller = router.access.owner_of(WHO)
    assert caller is not None

    async def run() -> None:
        async with router.access.charged(caller, "a", [request], cast(Any, choices)):
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await run()
    await until_reported(router)
    sums = await cluster.sums()
    assert (sums["input_tokens"], sums["output_tokens"]) == (2, 5)


async def test_usage_equals_the_bill_whatever_fails(
    cluster: Cluster, client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lost answers of Redis, pauses, failed requests and routers that die: to the token."""
    call, count = script_queue.call_together, [0]

    async def lossy(*args: Any) -> list[Any]:
        count[0] += 1
        if count[0] % 5 == 1:
            raise redis.ConnectionError("refused")
        answers = await call(*args)
        if count[0] % 5 == 3:
            raise redis.ConnectionError("reset")
        return answers

    async def sometimes(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        async for delta in routers[0].front.dispatcher.speak(request):
            yield delta
            if request.prompt_ids[0] == 9:
                raise errors.WorkerFailed("it died")

    monkeypatch.setattr(ledgers, "call_together", lossy)
    routers = [cluster.router(sometimes, key=key_of(budget=1.0))]
    wanted = {"requests": 0, "input_tokens": 0, "cached_input_tokens": 0, "output_tokens": 0}
    for round_ in range(6):
        router = routers[0]
        async with router.app() as http:
            bodies = [
                PROMPT | {"prompt": [5 + number % 5, 6, 7][: 1 + number % 3], "max_tokens": number}
                for number in range(1, 21)
            ]
            asked = [http.post("/v1/completions", json=body) for body in bodies]
            if round_ % 2:
                await client.client_pause(50)
            for answer in await asyncio.gather(*asked):
                if answer.status_code == 200:
                    usage = answer.json()["usage"]
                    wanted["requests"] += 1
                    wanted["input_tokens"] += usage["prompt_tokens"]
                    wanted["output_tokens"] += usage["completion_tokens"]
                    details = usage["prompt_tokens_details"]
                    wanted["cached_input_tokens"] += details["cached_tokens"]
        await router.die()
        await router.limits.close()
        cluster.routers.remove(router)
        routers[0] = cluster.router(sometimes, key=key_of(budget=1.0))
    async with asyncio.timeout(DEADLINE_S):
        while bills(cluster.folder):
            await asyncio.sleep(0.01)
    sums = await cluster.sums()
    cost = sums.pop("cost")
    assert sums == wanted
    assert wanted["requests"] > 60
    computed = wanted["input_tokens"] - wanted["cached_input_tokens"]
    cached, output = wanted["cached_input_tokens"], wanted["output_tokens"]
    assert cost == computed * 1000 + cached * 500 + output * 2000
    (budget,) = routers[0].budgets.of(routers[0].key)
    state: Any = await client.hgetall(budget.keys(f"baton:{{{cluster.id}}}")[0])
    assert int(state[b"spent"]) == cost
