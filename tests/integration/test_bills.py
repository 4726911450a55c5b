"""Bills, budgets and feedback in a real Valkey, and as clients see them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
import redis
import redis.asyncio

from baton import errors
from baton.config.access import KeyConfig
from baton.host.background import end_tasks
from baton.request import Principal
from baton.store.redis_client import redis_client
from router.access import rate_limits
from router.access.access import Access
from router.access.rate_limits import RateLimits
from router.access.visit import Visit
from router.billing import ledger as ledgers
from router.billing import ledger_scripts
from router.billing.ledger import Ledger
from router.billing.prices import BillLine
from router.core import script_queue
from router.core.request import GenerationRequest, OutputDelta
from router.usage.api import UsageApi
from router.usage.usage_store import Feedback, UsageStore
from router.workers.worker_links import WorkerLinks
from tests.support.mini_cluster import free_port, valkey
from tests.support.router.front_fakes import MODEL, Front, create_app, make_front

DEADLINE_S = 60.0
DOLLAR = 1_000_000_000
NOW = 1_795_000_000.0
"""2026-11-18, 10:26 in UTC."""
DAY = "2026-11-18"
SHOWN = {"authorization": "Bearer a-key"}
PROMPT = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
PRICES = {"input": 1.0, "cached_input": 0.5, "output": 2.0}
WHO = Principal("acme", "k")


def key_of(**fields: Any) -> dict[str, Any]:
    digest = hashlib.sha256(b"a-key").hexdigest()
    return {"name": "k", "tenant": "acme", "sha256": digest} | fields


@dataclass
class Router:
    """What a router process has of bills."""

    front: Front
    client: redis.asyncio.Redis
    cluster_id: str
    now: list[float] = field(default_factory=lambda: [NOW])

    def __post_init__(self) -> None:
        front, config = self.front, self.front.config
        unix = self.unix_clock
        self.ledger = Ledger(self.client, self.cluster_id, config, front.metrics, unix)
        self.budgets = self.ledger.budgets
        self.limits = RateLimits(self.client, self.cluster_id, front.metrics, budgets=self.budgets)
        self.store = UsageStore(self.client, self.cluster_id, unix)
        self.access = Access(config, front.metrics, self.limits, self.ledger)
        self.ledger.start()

    def unix_clock(self) -> float:
        return self.now[0]

    @property
    def key(self) -> KeyConfig:
        return self.front.config.keys[0]

    def lines(self, *tokens: tuple[int, int, int]) -> list[BillLine]:
        return [self.ledger.prices.line("short", *one) for one in tokens]

    def settle(self, *tokens: tuple[int, int, int], visit: Visit | None = None, **more: Any) -> str:
        answer_id = f"cmpl-{secrets.token_hex(4)}"
        hold = None if visit is None else visit.hold
        self.ledger.settle(WHO, more.get("agent", ""), answer_id, hold, self.lines(*tokens))
        return answer_id

    async def admitted(self, cost: int) -> Visit:
        visit = await self.limits.arrive(self.key, DEADLINE_S)
        assert visit is not None
        await self.limits.charge(visit, 1, [1], cost)
        return visit

    async def close(self) -> None:
        await self.limits.close()
        await self.ledger.close()

    async def die(self) -> None:
        """As by SIGKILL: nothing more is reported, and the lock of its journal is gone."""
        assert self.ledger._reporting is not None
        await end_tasks([self.ledger._reporting])
        if self.ledger._journal is not None:
            self.ledger._journal.close(remove=False)
            self.ledger._journal = None

    async def used(self) -> int:
        (budget,) = self.budgets.of(self.key)
        return await self.store.used(budget)

    @asynccontextmanager
    async def app(self) -> AsyncIterator[httpx.AsyncClient]:
        front, config = self.front, self.front.config
        links = cast(WorkerLinks, SimpleNamespace(all=list))
        usage = UsageApi(self.store, self.budgets, links, self.access, config, self.unix_clock)
        parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, config, self.access)
        transport = httpx.ASGITransport(create_app(*parts, more=(usage,)))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=SHOWN
        ) as http:
            yield http


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not look like a Redis that is away, and no test waits for more bills."""
    monkeypatch.setattr(rate_limits, "ANSWER_S", DEADLINE_S)
    monkeypatch.setattr(rate_limits, "AWAY_S", 0.01)
    monkeypatch.setattr(ledgers, "PAUSE_S", 0.0)
    monkeypatch.setattr(ledgers, "AWAY_S", 0.01)


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    opened = redis_client(redis_url)
    yield opened
    await opened.aclose()


@dataclass
class Cluster:
    client: redis.asyncio.Redis
    folder: Path
    id: str = field(default_factory=lambda: secrets.token_hex(4))
    routers: list[Router] = field(default_factory=list)

    def router(self, script: Any = None, *, key: Any = None, **config: Any) -> Router:
        settings = {
            "data_dir": str(self.folder),
            "prices": PRICES,
            "tenants": [{"name": "acme"}],
            "keys": [key or key_of()],
        }
        front = make_front(script, **(settings | config))
        made = Router(front, self.client, self.id)
        self.routers.append(made)
        return made

    async def sums(self) -> dict[str, int]:
        """All usage, by measure."""
        store = UsageStore(self.client, self.id)
        found: dict[str, int] = {}
        for entry in await store.entries([DAY], None):
            found[entry.measure] = found.get(entry.measure, 0) + entry.amount
        return found


@pytest.fixture
async def cluster(client: redis.asyncio.Redis, tmp_path: Path) -> AsyncIterator[Cluster]:
    made = Cluster(client, tmp_path)
    yield made
    for router in made.routers:
        await router.close()


def bills(folder: Path) -> list[Path]:
    return sorted((folder / "bills").glob("*"))


async def until_reported(router: Router) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while router.ledger._settled < router.ledger._written:
            await asyncio.sleep(0.01)


# The ledger


async def test_bills_are_added_up_by_whom_and_class(cluster: Cluster) -> None:
    router = cluster.router()
    router.settle((10, 4, 5), agent="writer")
    router.settle((1, 0, 1), (2, 0, 2), agent="writer")
    router.settle((1, 0, 1))
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
        (DAY, "acme", "k", "short", "writer"),
        (DAY, "acme", "k", "short", ""),
    }
    assert await router.store.entries([DAY], "other") == []
    assert bills(cluster.folder) == [], "Redis has all of it"


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


async def test_the_time_of_devices_counts_once_for_all_routers(cluster: Cluster) -> None:
    router = cluster.router()
    for _ in range(4):
        await router.store.count_devices({"prefill": 2, "decode": 4})
        await asyncio.sleep(0.05)
    seconds = await router.store.device_seconds([DAY])
    assert 0.1 <= seconds["prefill"] < DEADLINE_S
    assert seconds["decode"] == pytest.approx(2 * seconds["prefill"])


# Budgets


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


# As clients see it


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
    choices = [SimpleNamespace(begun=True, prompt_tokens=2, cached_tokens=0, completion_tokens=5)]
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


async def test_a_tenant_sees_its_own_usage_and_an_operator_all(cluster: Cluster) -> None:
    digest = hashlib.sha256(b"op").hexdigest()
    operator = {"name": "op", "tenant": "default", "sha256": digest, "scopes": ["admin"]}
    other = {"name": "o", "tenant": "default", "sha256": hashlib.sha256(b"o").hexdigest()}
    router = cluster.router(keys=[key_of(), operator, other], require_key=True)
    await router.store.count_devices({"decode": 1})
    async with router.app() as http:
        for secret in ("a-key", "o"):
            shown = {"authorization": f"Bearer {secret}"}
            await http.post("/v1/completions", json=PROMPT, headers=shown)
        await until_reported(router)
        seen = {}
        for secret in ("a-key", "o", "op"):
            shown = {"authorization": f"Bearer {secret}"}
            answer = await http.get("/v1/usage?by=tenant", headers=shown)
            report = answer.json()
            seen[secret] = [row["tenant"] for row in report["data"]]
            assert ("device_hours" in report) == (secret == "op")
        assert seen == {"a-key": ["acme"], "o": ["default"], "op": ["acme", "default"]}
        assert (await http.get("/v1/usage", headers={"authorization": ""})).status_code == 401


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("by=color", "by must list some of day, tenant, key, class, agent"),
        ("by=day,day", "each once"),
        ("start=yesterday", "start must be a day"),
        ("start=2026-11-19", "start must not be after end"),
        ("start=2026-01-01", "at most 92 days apart"),
    ],
)
async def test_questions_that_make_no_sense(cluster: Cluster, query: str, message: str) -> None:
    async with cluster.router().app() as http:
        answer = await http.get(f"/v1/usage?{query}")
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


async def test_feedback_makes_a_cost_per_success(cluster: Cluster) -> None:
    router = cluster.router()
    async with router.app() as http:
        ids = []
        for _ in range(3):
            body = PROMPT | {"metadata": {"agent": "wrîter/1"}}
            ids.append((await http.post("/v1/completions", json=body)).json()["id"])
        await until_reported(router)
        for told in (
            {"id": ids[0], "success": False, "score": 0.25},
            {"id": ids[0], "success": True, "score": 0.5, "comment": "second thoughts"},
            {"id": ids[0], "success": True, "score": 0.5, "comment": "second thoughts"},
            {"id": ids[1], "success": False},
        ):
            answer = await http.post("/v1/feedback", json=told)
            assert answer.status_code == 200, answer.text
        (row,) = (await http.get("/v1/usage?by=agent")).json()["data"]
        assert (row["agent"], row["successes"], row["failures"]) == ("wrîter/1", 1, 1)
        assert row["mean_score"] == 0.5
        assert row["cost_per_success"] == row["cost"]
        kept = (await http.get(f"/v1/feedback/{ids[0]}")).json()
        assert (kept["success"], kept["comment"]) == (True, "second thoughts")
        assert (await http.get(f"/v1/feedback/{ids[2]}")).status_code == 404
        # Another tenant has no such answer.
        with pytest.raises(errors.NotFound):
            await router.store.rate("default", ids[0], Feedback(True))
        router.now[0] += 26 * 3600
        answer = await http.post("/v1/feedback", json={"id": ids[0], "success": True})
        assert answer.status_code == 404
        assert "for a day" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "told",
    [
        {"id": "x"},
        {"id": "", "success": True},
        {"id": "x" * 129, "success": True},
        {"id": "x", "success": "yes"},
        {"id": "x", "success": True, "score": 2},
        {"id": "x", "success": True, "comment": "x" * 1001},
        {"id": "x", "success": True, "color": "red"},
    ],
)
async def test_feedback_is_bounded(cluster: Cluster, told: dict[str, Any]) -> None:
    async with cluster.router().app() as http:
        assert (await http.post("/v1/feedback", json=told)).status_code == 400


async def test_without_redis_usage_is_unavailable(tmp_path: Path) -> None:
    client = redis_client(f"redis://127.0.0.1:{free_port()}/0")
    router = Cluster(client, tmp_path).router()
    async with router.app() as http:
        assert (await http.get("/v1/usage")).status_code == 503
        told = {"id": "x", "success": True}
        assert (await http.post("/v1/feedback", json=told)).status_code == 503
    await router.close()
    await client.aclose()


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
