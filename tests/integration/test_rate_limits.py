"""Limits of API keys in a real Valkey, and as clients see them."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest
import redis.asyncio
from prometheus_client import CollectorRegistry

from baton import errors
from baton.config.access import KeyConfig
from baton.store.redis_client import redis_client
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import inference_pb2, inference_pb2_grpc, tokens_pb2, tokens_pb2_grpc
from router.access import limit_scripts, rate_limits
from router.access.access import Access
from router.access.rate_limits import RateLimits
from router.access.visit import Visit
from router.billing.budgets import Hold
from router.core import script_queue
from router.core.request import GenerationRequest
from tests.chaos.harness.clock import Clock
from tests.support.mini_cluster import free_port, valkey
from tests.support.router.front_fakes import MODEL, Front, create_app, make_front
from tests.support.router.grpc_inference import serve

DEADLINE_S = 60.0
PROMPT = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
SHOWN = {"authorization": "Bearer a-key"}


def key(**limits: int) -> KeyConfig:
    digest = hashlib.sha256(b"a-key").hexdigest()
    return KeyConfig(name="k", tenant="default", sha256=digest, **limits)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine must not look like a Redis that is away."""
    monkeypatch.setattr(rate_limits, "ANSWER_S", DEADLINE_S)


def metrics() -> RouterMetrics:
    return RouterMetrics(CollectorRegistry())


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    opened = redis_client(redis_url)
    yield opened
    await opened.aclose()


@pytest.fixture
def cluster_id() -> str:
    return secrets.token_hex(4)


@pytest.fixture
async def limits(client: redis.asyncio.Redis, cluster_id: str) -> AsyncIterator[RateLimits]:
    opened = RateLimits(client, cluster_id, metrics())
    yield opened
    await opened.close()


async def enter(
    limits: RateLimits, limited: KeyConfig, tokens: int = 1, deadline_s: float = 300.0
) -> Visit:
    visit = await limits.arrive(limited, deadline_s)
    assert visit is not None
    try:
        await limits.charge(visit, tokens, ())
    except errors.BatonError:
        limits.leave(visit)
        raise
    return visit


async def refused(limits: RateLimits, limited: KeyConfig, tokens: int = 1) -> Any:
    with pytest.raises(errors.RateLimitExceeded) as caught:
        await enter(limits, limited, tokens)
    return caught.value


async def uncounted(limits: RateLimits, limited: KeyConfig) -> Visit:
    """A request that arrives while Redis does not answer."""
    visit = await limits.arrive(limited, 300.0)
    assert visit is not None
    assert visit.unsure
    return visit


def leave(limits: RateLimits, visit: Visit, generated: int, *, turned_away: bool = False) -> None:
    if not turned_away:
        limits.answered(visit, visit.reserved, [generated])
    limits.leave(visit)


async def left(
    limits: RateLimits, visit: Visit, generated: int, *, turned_away: bool = False
) -> None:
    leave(limits, visit, generated, turned_away=turned_away)
    await limits.close()


async def test_requests_per_minute_are_one_limit_for_all_routers(
    client: redis.asyncio.Redis, limits: RateLimits, cluster_id: str
) -> None:
    other = RateLimits(client, cluster_id, metrics())
    limited = key(requests_per_minute=3)
    for router, remaining in ((limits, 2), (other, 1), (limits, 0)):
        (allowance,) = (await enter(router, limited)).allowances
        assert (allowance.limit, allowance.remaining) == (3, remaining)
    error = await refused(other, limited)
    assert "3 requests a minute" in error.message
    # One comes back every 20 s.
    assert 5.0 < error.retry_after <= 20.0
    assert error.facts["x-ratelimit-limit-requests"] == "3"
    assert error.facts["x-ratelimit-remaining-requests"] == "0"
    assert error.facts["x-ratelimit-reset-requests"].endswith("s")
    # Another key has a limit of its own, and so has another cluster.
    await enter(limits, KeyConfig(name="other", tenant="default", requests_per_minute=1))
    await enter(RateLimits(client, secrets.token_hex(4), metrics()), limited)


async def test_what_was_refused_costs_a_request_and_no_tokens(limits: RateLimits) -> None:
    limited = key(requests_per_minute=5, tokens_per_minute=100)
    await enter(limits, limited, 60)
    error = await refused(limits, limited, 60)
    assert "100 tokens a minute" in error.message
    assert 2.0 < error.retry_after <= 12.0
    visit = await enter(limits, limited, 40)
    requests, tokens = visit.allowances
    assert (requests.remaining, tokens.remaining) == (2, 0)
    assert 30.0 < tokens.reset_s <= 60.0


async def test_refusals_by_the_limit_of_requests_cost_nothing(limits: RateLimits) -> None:
    limited = key(requests_per_minute=6)
    for _ in range(6):
        await enter(limits, limited)
    waits = [(await refused(limits, limited)).retry_after for _ in range(5)]
    assert max(waits) <= 10.0


async def test_answers_are_charged_in_advance_what_they_may_cost(limits: RateLimits) -> None:
    """Otherwise a key could begin any number of long answers at once."""
    limited = key(tokens_per_minute=1000)
    visits = []
    for _ in range(20):
        visit = await limits.arrive(limited, 300.0)
        assert visit is not None
        visits.append(visit)
    await limits.charge(visits[0], 10, [512] * 8)
    for visit in visits[1:]:
        with pytest.raises(errors.RateLimitExceeded):
            await limits.charge(visit, 10, [512] * 8)
    assert [visit.reserved for visit in visits[:2]] == [1000, 0]
    limits.answered(visits[0], 10, [90])
    limits.leave(visits[0])
    await limits.close()
    # What was not used came back.
    await limits.charge(visits[1], 100, [100])
    (allowance,) = visits[1].allowances
    assert allowance.remaining >= 700
    assert visits[1].reserved == 200


async def test_long_limits_are_charged_as_the_key_s_answers_were(limits: RateLimits) -> None:
    limited = key(tokens_per_minute=100_000)
    for length, expected in ((7, 512), (600, 600), (5, 600)):
        visit = await enter(limits, limited, 10)
        leave(limits, visit, length)
        visit = await enter(limits, limited, 10)
        await limits.charge(visit, 10, [8192, 100])
        assert visit.reserved == 10 + expected + 100
        leave(limits, visit, 1)


async def test_answers_are_charged_when_they_have_ended(limits: RateLimits) -> None:
    limited = key(tokens_per_minute=100)
    charge = await enter(limits, limited, 90)
    await left(limits, charge, 70)
    error = await refused(limits, limited, 1)
    # 61 tokens too many, at 100 a minute.
    assert 20.0 < error.retry_after <= 36.6


async def test_a_request_rejected_elsewhere_gets_its_tokens_and_place_back(
    client: redis.asyncio.Redis, limits: RateLimits, cluster_id: str
) -> None:
    limited = key(requests_per_minute=4, tokens_per_minute=100, concurrency=1)
    for _ in range(3):
        charge = await enter(limits, limited, 100)
        await left(limits, charge, 0, turned_away=True)
    requests, _ = (await enter(limits, limited, 100)).allowances
    assert requests.remaining == 0
    await refused(limits, limited)
    # Nothing stays for ever.
    for name in await client.keys(f"*{cluster_id}*"):
        assert 0 < await client.pttl(name) <= (300 + limit_scripts.GRACE_S + 1) * 1000


async def test_more_tokens_than_there_ever_are(limits: RateLimits) -> None:
    with pytest.raises(errors.RequestTooLarge, match="101 tokens"):
        await enter(limits, key(tokens_per_minute=100), 101, 1.0)


async def test_concurrency(limits: RateLimits) -> None:
    limited = key(concurrency=2)
    first = await enter(limits, limited)
    await enter(limits, limited)
    error = await refused(limits, limited)
    assert "2 requests at a time" in error.message
    assert error.retry_after > 0
    await left(limits, first, 0)
    await enter(limits, limited)
    await refused(limits, limited)


async def test_a_request_whose_router_died_counts_until_its_deadline(limits: RateLimits) -> None:
    limited = key(concurrency=1)
    await enter(limits, limited, deadline_s=0.3)
    await refused(limits, limited)
    async with asyncio.timeout(DEADLINE_S):
        while True:
            try:
                await enter(limits, limited)
            except errors.RateLimitExceeded:
                await asyncio.sleep(0.05)
            else:
                return


async def test_many_at_once_never_exceed_the_limit(limits: RateLimits) -> None:
    limited = key(requests_per_minute=20, concurrency=15)
    answers = await asyncio.gather(
        *(enter(limits, limited) for _ in range(60)),
        return_exceptions=True,
    )
    assert sum(isinstance(answer, Visit) for answer in answers) == 15
    assert sum(isinstance(answer, errors.RateLimitExceeded) for answer in answers) == 45


async def test_without_redis_each_router_admits_what_its_own_count_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # There is no answer to wait for.
    monkeypatch.setattr(rate_limits, "ANSWER_S", 0.05)
    now = [0.0]
    limited = key(requests_per_minute=3)
    for _ in range(2):
        counted = metrics()
        client = redis_client(f"redis://127.0.0.1:{free_port()}/0")
        limits = RateLimits(client, "c", counted, lambda: now[0])
        for _ in range(3):
            await uncounted(limits, limited)
        error = await refused(limits, limited)
        assert error.retry_after == pytest.approx(20.0)
        # The refused request was never sent to Redis, and is not reported.
        assert not limits._reports
        value = counted.registry.get_sample_value("baton_rate_limit_failures_total")
        assert value == 4
        now[0] += 20.0
        await uncounted(limits, limited)
        await refused(limits, limited)
        await limits.close()
        await client.aclose()


async def test_what_redis_has_counted_counts_when_it_is_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_limits, "AWAY_S", 0.0)
    limited = key(requests_per_minute=4, tokens_per_minute=1000, concurrency=3)
    with valkey(free_port()) as url:
        client = redis_client(url)
        limits = RateLimits(client, "c", metrics())
        first = await enter(limits, limited, 600)
        await enter(limits, limited)
    monkeypatch.setattr(rate_limits, "ANSWER_S", 0.05)
    await uncounted(limits, limited)
    error = await refused(limits, limited)
    assert "3 requests at a time" in error.message
    leave(limits, first, 600)
    visit = await uncounted(limits, limited)
    with pytest.raises(errors.RateLimitExceeded, match="1000 tokens a minute"):
        await limits.charge(visit, 500, [])
    leave(limits, visit, 0)
    error = await refused(limits, limited)
    assert "4 requests a minute" in error.message
    await limits.close()
    await client.aclose()


async def test_five_minutes_without_redis_are_charged_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is remembered is bounded by what ran before, and by the number of keys."""
    monkeypatch.setattr(rate_limits, "AWAY_S", 0.01)
    port, now = free_port(), [0.0]
    limited = key(requests_per_minute=1000, tokens_per_minute=100_000, concurrency=200)
    with valkey(port) as url:
        client = redis_client(url)
        limits = RateLimits(client, "c", metrics(), lambda: now[0])
        visits = [await enter(limits, limited) for _ in range(60)]
        tasks = len(asyncio.all_tasks())
    for second in range(300):
        now[0] = float(second)
        for visit in (await uncounted(limits, limited), *visits[:1]):
            leave(limits, visit, 100)
        visits = visits[1:]
        assert not limits._queue._waiting
        assert len(asyncio.all_tasks()) <= tasks + 1, (
            "the task that reports requests that have left"
        )
    assert len(limits._reports) <= 60 + script_queue.MAX_TOGETHER
    with valkey(port):
        async with asyncio.timeout(DEADLINE_S):
            while limits._reports:
                await asyncio.sleep(0.01)
        assert await client.zcard("baton:{c}:limit:k:running") == 0
        now[0] += 1.0
        requests, tokens = (await enter(limits, limited)).allowances
        # Redis has lost what was before. Some of the 300 are there again by now.
        assert 698 <= requests.remaining < 900
        assert 69_900 <= tokens.remaining < 90_000
    await limits.close()
    await client.aclose()


async def test_an_answer_that_comes_too_late_counts_once(
    client: redis.asyncio.Redis,
    limits: RateLimits,
    cluster_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A request that went on unsure holds no place once it has left, and is charged."""
    limited = key(requests_per_minute=2, tokens_per_minute=100, concurrency=1)
    monkeypatch.setattr(rate_limits, "AWAY_S", 0.0)
    monkeypatch.setattr(rate_limits, "ANSWER_S", 0.0)
    await client.client_pause(100)
    visit = await uncounted(limits, limited)
    assert visit.sent
    leave(limits, visit, 60)
    monkeypatch.setattr(rate_limits, "ANSWER_S", DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while limits._queue._carrying or limits._reports:
            await asyncio.sleep(0.01)
    assert await running(client, cluster_id) == 0
    requests, tokens = (await enter(limits, limited, 0)).allowances
    assert requests.remaining == 0
    assert 40 <= tokens.remaining <= 45


@pytest.mark.parametrize("pause_ms", [20, 200, 1000])
async def test_a_pause_of_any_length_leaks_no_place_and_loses_no_charge(
    client: redis.asyncio.Redis,
    limits: RateLimits,
    cluster_id: str,
    monkeypatch: pytest.MonkeyPatch,
    pause_ms: int,
) -> None:
    """It is longer than the deadlines of requests and of calls, whose connections are then cut."""
    limited = key(requests_per_minute=1000, tokens_per_minute=100_000, concurrency=500)
    before = [await enter(limits, limited, 100) for _ in range(100)]
    for name, value in (("ANSWER_S", 0.02), ("AWAY_S", 0.05)):
        monkeypatch.setattr(rate_limits, name, value)
    monkeypatch.setattr(script_queue, "CALL_S", 0.1)
    await client.client_pause(pause_ms)
    during = [await limits.arrive(limited, 300.0) for _ in range(100)]
    for visit in (*before, *during):
        assert visit is not None
        limits.answered(visit, 100, [200])
        limits.leave(visit)
    monkeypatch.setattr(rate_limits, "ANSWER_S", DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while limits._queue._carrying or limits._reports:
            await asyncio.sleep(0.01)
    assert await running(client, cluster_id) == 0
    monkeypatch.setattr(limits, "_away_until", 0.0)
    requests, tokens = (await enter(limits, limited, 0)).allowances
    # 201 requests and 60,000 tokens, less what has come back in a few seconds.
    assert 799 <= requests.remaining <= 799 + 140
    assert 40_000 <= tokens.remaining <= 40_000 + 20_000


async def test_a_request_that_redis_hears_of_after_its_end_holds_no_place(
    client: redis.asyncio.Redis, limits: RateLimits, cluster_id: str
) -> None:
    """Two connections: the first call may be served last."""
    limited = key(requests_per_minute=10, concurrency=1)
    visit = Visit(limited, Hold("late"), 300.0, 0.0, sent=True)
    for _ in range(2):
        limits.leave(visit)
        await limits.close()
    await script_queue.call_together(client, [limits._call(visit, 1, 0)])
    assert await running(client, cluster_id) == 0
    (requests,) = (await enter(limits, limited)).allowances
    assert requests.remaining == 8


async def test_a_request_without_a_deadline_is_renewed(
    client: redis.asyncio.Redis,
    limits: RateLimits,
    cluster_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rate_limits, "_RENEW_S", 0.01)
    visit = await limits.arrive(key(concurrency=1), None)
    assert visit is not None
    name = f"baton:{{{cluster_id}}}:limit:k:running"
    began = await client.zscore(name, visit.hold.entry)
    async with asyncio.timeout(DEADLINE_S):
        while await client.zscore(name, visit.hold.entry) == began:
            await asyncio.sleep(0.01)
    limits.leave(visit)
    await limits.close()
    assert await running(client, cluster_id) == 0


async def running(client: redis.asyncio.Redis, cluster_id: str) -> int:
    return int(await client.zcard(f"baton:{{{cluster_id}}}:limit:k:running"))


async def test_requests_that_end_while_redis_is_away_are_reported_when_it_is_back(
    client: redis.asyncio.Redis,
    limits: RateLimits,
    cluster_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One slow answer must not cost a key its places until the deadlines of what ran."""
    limited = key(concurrency=3, tokens_per_minute=100)
    charges = [await enter(limits, limited) for _ in range(2)]
    monkeypatch.setattr(rate_limits, "ANSWER_S", 0.01)
    monkeypatch.setattr(rate_limits, "AWAY_S", 0.01)
    await client.client_pause(100)
    limits.leave(await uncounted(limits, limited))
    monkeypatch.setattr(limits, "_away_until", float("inf"))
    for charge in charges:
        leave(limits, charge, 30)
    async with asyncio.timeout(DEADLINE_S):
        while await running(client, cluster_id):
            await asyncio.sleep(0.01)
    monkeypatch.setattr(rate_limits, "ANSWER_S", DEADLINE_S)
    await limits.close()
    monkeypatch.setattr(limits, "_away_until", 0.0)
    (allowance,) = (await enter(limits, limited)).allowances
    assert 36 <= allowance.remaining <= 39


async def test_a_leave_whose_answer_is_lost_is_charged_once(
    limits: RateLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    limited = key(tokens_per_minute=1000, requests_per_minute=10)
    charges = [await enter(limits, limited, 100) for _ in range(2)]
    monkeypatch.setattr(rate_limits, "AWAY_S", 0.0)
    answered, lost = script_queue.call_together, []

    async def call(*args: Any) -> list[Any]:
        answers = await answered(*args)
        lost.append(answers)
        if len(lost) < 3:
            raise redis.ConnectionError("reset")
        return answers

    monkeypatch.setattr(rate_limits, "call_together", call)
    leave(limits, charges[0], 300)
    leave(limits, charges[1], 0, turned_away=True)
    await limits.close()
    assert len(lost) == 3
    requests, tokens = (await enter(limits, limited, 1)).allowances
    assert requests.remaining == 7
    assert 599 <= tokens.remaining <= 620


async def test_a_leave_that_redis_refuses_is_logged_and_told_again(
    client: redis.asyncio.Redis,
    limits: RateLimits,
    cluster_id: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    charge = await enter(limits, key(concurrency=1))
    monkeypatch.setattr(rate_limits, "AWAY_S", 0.0)
    answered, refusals = script_queue.call_together, [redis.ResponseError("NOPERM no permission")]

    async def call(*args: Any) -> list[Any]:
        return [refusals.pop()] if refusals else await answered(*args)

    monkeypatch.setattr(rate_limits, "call_together", call)
    leave(limits, charge, 0)
    async with asyncio.timeout(DEADLINE_S):
        while await running(client, cluster_id):
            await asyncio.sleep(0.01)
    assert "NOPERM" in caplog.text


async def test_limits_that_close_leave_no_task_behind(
    client: redis.asyncio.Redis, limits: RateLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limits, "ANSWER_S", 0.0)
    await client.client_pause(100)
    leave(limits, await uncounted(limits, key(concurrency=1)), 1)
    monkeypatch.setattr(rate_limits, "ANSWER_S", DEADLINE_S)
    before = asyncio.all_tasks()
    await limits.close()
    await asyncio.sleep(0)
    assert not asyncio.all_tasks() - before


async def test_no_request_waits_for_a_connection_for_longer_than_for_an_answer(
    client: redis.asyncio.Redis,
    limits: RateLimits,
    cluster_id: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All connections wait for Redis; a further request goes uncounted, and holds no place."""
    limited = key(concurrency=100)
    await enter(limits, limited)
    monkeypatch.setattr(rate_limits, "AWAY_S", 0.0)
    monkeypatch.setattr(rate_limits, "ANSWER_S", 0.01)
    await client.client_pause(300)
    for _ in range(rate_limits.MAX_CONNECTIONS + 2):
        limits.leave(await uncounted(limits, limited))
    monkeypatch.setattr(rate_limits, "ANSWER_S", DEADLINE_S)
    async with asyncio.timeout(DEADLINE_S):
        while limits._queue._carrying or limits._reports:
            await asyncio.sleep(0.01)
    assert await running(client, cluster_id) == 1


async def test_requests_of_one_id_are_two(limits: RateLimits) -> None:
    """Clients choose ids; what enters has a name of its own."""
    limited = key(concurrency=2)
    first, second = await enter(limits, limited), await enter(limits, limited)
    assert first.hold.entry != second.hold.entry
    await refused(limits, limited)


async def test_a_server_that_has_forgotten_the_scripts(
    client: redis.asyncio.Redis, limits: RateLimits
) -> None:
    limited = key(concurrency=2)
    await enter(limits, limited)
    await client.script_flush()
    await enter(limits, limited)
    await refused(limits, limited)


@pytest.mark.parametrize("kind", ["requests", "tokens", "running", "clock", "charged"])
@pytest.mark.parametrize("ended", [0, 1, 2])
async def test_a_lost_key_limits_again_once_what_ran_has_ended(
    client: redis.asyncio.Redis, limits: RateLimits, cluster_id: str, kind: str, ended: int
) -> None:
    limited = key(requests_per_minute=100, tokens_per_minute=100_000, concurrency=2)
    charges = [await enter(limits, limited) for _ in range(2)]
    for charge in charges[:ended]:
        await left(limits, charge, 1)
    await client.delete(f"baton:{{{cluster_id}}}:limit:k:{kind}")
    for charge in charges[ended:]:
        await left(limits, charge, 1)
    for _ in range(2):
        requests, tokens = (await enter(limits, limited)).allowances
        assert requests.remaining >= 96
        assert tokens.remaining > 99_900
    await refused(limits, limited)
    for name in await client.keys(f"*{cluster_id}*"):
        assert await client.pttl(name) != -1, "it has no TTL"


async def test_a_clock_that_is_set_back_refuses_no_request_for_as_long(
    clocked_url: str, clock: Clock
) -> None:
    """Nor does a request of a dead router hold its place until the clock has caught up."""
    async with redis_client(clocked_url) as client:
        limits = RateLimits(client, "c", metrics())
        limited = key(requests_per_minute=600, tokens_per_minute=600, concurrency=2)
        await left(limits, await enter(limits, limited, 500), 50)
        await enter(limits, limited, 0, deadline_s=300.0)
        before, _ = await client.time()
        clock.jump(-3600)
        async with asyncio.timeout(DEADLINE_S):
            while (await client.time())[0] > before - 1800:
                await asyncio.sleep(0.01)
        assert (await refused(limits, limited, 100)).retry_after < 60
        requests, tokens = (await enter(limits, limited, 0)).allowances
        assert requests.remaining > 590
        assert tokens.reset_s < 90
        assert "at a time" in (await refused(limits, limited, 0)).message
        for name in await client.keys("*"):
            assert 0 < await client.pttl(name) <= (300 + limit_scripts.GRACE_S + 60) * 1000
        await limits.close()


# As clients see it


@asynccontextmanager
async def app_of(front: Front, limits: RateLimits) -> AsyncIterator[httpx.AsyncClient]:
    access = Access(front.config, front.metrics, limits)
    app = create_app(front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as http:
        yield http


async def test_refusals_are_counted_by_tenant(limits: RateLimits) -> None:
    """Those of a limit of requests at their arrival, those of a limit of tokens later."""
    limited = key(requests_per_minute=2, tokens_per_minute=2)
    front = make_front(keys=[limited.model_dump()])
    access = Access(front.config, front.metrics, limits)
    app = create_app(front.dispatcher, front.tokenizer, MODEL, front.stats, front.config, access)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as http:
        for status in (413, 413, 429):
            answer = await http.post("/v1/completions", json=PROMPT, headers=SHOWN)
            assert answer.status_code == status, answer.text
    tenant = limited.tenant
    refused = {
        (labels["tenant"], labels["code"]): value
        for family in front.metrics.registry.collect()
        for name, labels, value, *_ in family.samples
        if name == "baton_tenant_requests_total"
    }
    assert refused == {
        (tenant, "request_too_large"): 2,
        (tenant, "rate_limit_exceeded"): 1,
    }


@pytest.mark.parametrize("stream", [False, True])
async def test_headers(limits: RateLimits, stream: bool) -> None:
    front = make_front(keys=[key(requests_per_minute=2, tokens_per_minute=12).model_dump()])
    async with app_of(front, limits) as http:
        for remaining in ("1", "0"):
            body = {**PROMPT, "stream": stream}
            answer = await http.post("/v1/completions", json=body, headers=SHOWN)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-ratelimit-limit-requests"] == "2"
            assert answer.headers["x-ratelimit-remaining-requests"] == remaining
            assert answer.headers["x-ratelimit-limit-tokens"] == "12"
            # 3 of the prompt and 2 of the answer, twice; every 5 s one is back.
            assert int(answer.headers["x-ratelimit-remaining-tokens"]) in (
                {7} if remaining == "1" else range(2, 8)
            )
            await limits.close()
        answer = await http.post("/v1/completions", json=PROMPT, headers=SHOWN)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert 20 <= int(answer.headers["retry-after"]) <= 30
        assert answer.headers["x-ratelimit-remaining-requests"] == "0"
        # Without the key nothing is limited, and nothing told.
        answer = await http.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]
    assert front.requests() == {
        ("short", "ok", ""): 3,
        ("unknown", "shed", "rate_limit_exceeded"): 1,
    }


async def test_a_shed_request_keeps_its_tokens(limits: RateLimits) -> None:
    async def full(request: GenerationRequest) -> Any:
        raise errors.Overloaded("full", retry_after=1.0)
        yield

    front = make_front(
        full, keys=[key(requests_per_minute=3, tokens_per_minute=6, concurrency=1).model_dump()]
    )
    async with app_of(front, limits) as http:
        for _ in range(3):
            answer = await http.post("/v1/completions", json=PROMPT, headers=SHOWN)
            assert answer.json()["error"]["code"] == "overloaded"
            await limits.close()
        answer = await http.post("/v1/completions", json=PROMPT, headers=SHOWN)
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
async def test_a_body_that_is_refused_counts_as_a_request(limits: RateLimits, path: str) -> None:
    """Otherwise a client could have any number of bodies read and checked."""
    front = make_front(keys=[key(requests_per_minute=2, concurrency=1).model_dump()])
    async with app_of(front, limits) as http:
        for status in (400, 400, 429):
            answer = await http.post(path, content=b"{", headers=SHOWN)
            assert answer.status_code == status
            await limits.close()


async def test_calls_of_grpc_count_when_they_arrive_and_leave_when_they_end(
    limits: RateLimits,
) -> None:
    front = make_front(keys=[key(requests_per_minute=4, concurrency=1).model_dump()])
    shown = tuple(SHOWN.items())
    async with serve(front, limits) as channel:
        inference = inference_pb2_grpc.InferenceServiceStub(channel)
        tokens = tokens_pb2_grpc.TokenServiceStub(channel)

        async def call(request: inference_pb2.GenerateRequest) -> list[Any]:
            answer = inference.Generate(request, metadata=shown, timeout=DEADLINE_S)
            return [message async for message in answer]

        good = inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5, 6, 7]))
        good.sampling.max_tokens = 2
        for request in (inference_pb2.GenerateRequest(model="none"), good):
            if request is good:
                assert await call(request)
            else:
                with pytest.raises(grpc.aio.AioRpcError) as refusal:
                    await call(request)
                assert refusal.value.code() is grpc.StatusCode.NOT_FOUND
            await limits.close()
            text = tokens_pb2.TokenizeRequest(prompt="x")
            await tokens.Tokenize(text, metadata=shown, timeout=DEADLINE_S)
            await limits.close()
        with pytest.raises(grpc.aio.AioRpcError) as used_up:
            await call(good)
        assert used_up.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "4 requests a minute" in str(used_up.value.details())
