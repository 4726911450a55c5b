"""Prefixes that clients pin, on real workers: they stay, count, end, and come back."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from baton.config.access import KeyConfig, TenantConfig
from baton.sampling_params import SamplingParams
from baton.store.pin_store import PinStore
from baton.store.redis_client import redis_client
from engine.scheduling.retention import RetentionBook
from router.access.access import Access
from router.admin.cache import CacheApi, CacheControl
from router.core.served_model import ServedModel
from router.prefixes.api import PATH, PrefixApi
from router.prefixes.pinning import PrefixPinning
from tests.support.integration.handoff import BLOCK, prompt_of
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from tests.support.router.front_fakes import create_app, service_of
from tests.support.router.pins import pin

MODEL = ServedModel(id="tiny", created=1_700_000_000, context_length=512, embedding_size=8)
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
BLOCKS = 10
PREFIX = prompt_of(BLOCKS * BLOCK + 3, 99)
SMALL: dict[str, Any] = {"kv_pool_mib": 1, "heartbeat_s": 0.2}
"""A pool that a dozen prompts fill."""


def key(name: str, tenant: str) -> KeyConfig:
    return KeyConfig(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=tenant)


@dataclass(frozen=True)
class Client:
    cluster: MiniCluster
    http: httpx.AsyncClient

    async def pin(self, ttl: int = 600, as_key: str = "", **more: Any) -> httpx.Response:
        body = {"prompt": list(PREFIX), "ttl": ttl, **more}
        return await self.http.post(PATH, json=body, headers=_shown(as_key))

    async def pins(self, as_key: str = "") -> list[dict[str, Any]]:
        answer = await self.http.get(PATH, headers=_shown(as_key))
        assert answer.status_code == 200, answer.text
        found: list[dict[str, Any]] = answer.json()["data"]
        return found

    async def unpin(self, name: str, as_key: str = "") -> int:
        answer = await self.http.delete(f"{PATH}/{name}", headers=_shown(as_key))
        return answer.status_code

    async def ask(self, as_key: str = "") -> tuple[int, int]:
        """Tokens of a prompt with the prefix that were read from caches, and written to them."""
        body = {"model": "tiny", "prompt": [*PREFIX, 5, 6], "max_tokens": 2, "temperature": 0}
        answer = await self.http.post("/v1/completions", json=body, headers=_shown(as_key))
        assert answer.status_code == 200, answer.text
        details = answer.json()["usage"]["prompt_tokens_details"]
        await self.cluster.until_idle()
        return details["cached_tokens"], details["cache_write_tokens"]

    async def fill_the_pool(self) -> None:
        """Prompts of others, until none of what was cached before and is not kept is left."""
        for salt in range(1, 13):
            await self.cluster.answer(prompt_of(25 * BLOCK + 3, salt), GREEDY)
        await self.cluster.until_idle()

    async def pinned_blocks(self) -> dict[str, int]:
        """By worker, and of ``all``, as the operators read them."""
        answer = await self.http.get("/v1/cache/stats")
        assert answer.status_code == 200, answer.text
        stats = answer.json()
        found = {worker["slot"]: worker["pinned_blocks"] for worker in stats["workers"]}
        return found | {"all": stats["pinned_blocks"]}

    async def until_pinned(self, slot: str, blocks: int) -> None:
        """Return once `/v1/cache/stats` shows that ``slot`` alone pins ``blocks`` blocks."""
        wanted = dict.fromkeys(("prefill-0", "decode-0"), 0) | {slot: blocks, "all": blocks}
        async with asyncio.timeout(DEADLINE_S):
            while (await self.pinned_blocks()) != wanted:
                await asyncio.sleep(0.05)

    @property
    def book(self) -> RetentionBook:
        """That of the worker that computes prompts."""
        is_local = self.cluster.config.local_prefill == "always"
        context = self.cluster.workers["decode-0" if is_local else "prefill-0"].context
        assert context is not None
        return context.core.retention


def _shown(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"} if name else {}


@asynccontextmanager
async def client_of(model: Path, redis_url: str, **changes: Any) -> AsyncIterator[Client]:
    async with mini_cluster(model, redis_url, **changes) as cluster:
        access = Access(cluster.config, cluster.metrics)
        parts = (cluster.dispatcher, cluster.tokenizer, MODEL, cluster.stats, cluster.config)
        service = service_of(*parts, access)
        store = PinStore(cluster.redis, cluster.cluster_id)
        api = PrefixApi(service, PrefixPinning(service, cluster.dispatcher, store))
        control = CacheControl(cluster.dispatcher.workers.all, cluster.index, cluster.metrics)
        app = create_app(*parts, access, more=(api, CacheApi(control, access)))
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=DEADLINE_S
        ) as http:
            yield Client(cluster, http)


@pytest.mark.parametrize("local", ["never", "always"])
async def test_a_pinned_prefix_stays_until_it_is_unpinned(
    tiny_model: Path, redis_url: str, local: str
) -> None:
    async with client_of(tiny_model, redis_url, local_prefill=local, **SMALL) as client:
        answer = await client.pin(name="handbook")
        assert answer.status_code == 200, answer.text
        body = answer.json()
        assert (body["tokens"], body["pinned_tokens"]) == (len(PREFIX), BLOCKS * BLOCK)
        worker = "decode-0" if local == "always" else "prefill-0"
        await client.until_pinned(worker, BLOCKS)
        usage = {"prompt_tokens": len(PREFIX), "cached_tokens": 0}
        assert body["usage"] == usage | {"cache_write_tokens": BLOCKS * BLOCK}
        await client.fill_the_pool()
        assert await client.ask() == (BLOCKS * BLOCK, 0)
        (listed,) = await client.pins()
        assert listed == {name: value for name, value in body.items() if name != "usage"}
        assert (listed["name"], listed["object"]) == ("handbook", "cache.prefix")
        assert client.cluster.value("prefill-0", "baton_kv_blocks", state="used") == 0
        assert await client.unpin(body["id"]) == 200
        assert await client.pins() == []
        assert client.book.total == 0
        await client.until_pinned(worker, 0)
        assert await client.unpin(body["id"]) == 404
        await client.fill_the_pool()
        assert await client.ask() == (0, 0)


async def test_pinned_again_it_stays_for_longer_and_costs_nothing(
    tiny_model: Path, redis_url: str
) -> None:
    async with client_of(tiny_model, redis_url, **SMALL) as client:
        first = (await client.pin(ttl=60)).json()
        again = (await client.pin(ttl=600)).json()
        shorter = (await client.pin(ttl=30)).json()
        assert again["id"] == shorter["id"] == first["id"]
        assert again["expires_at"] >= first["expires_at"] + 500
        assert shorter["expires_at"] == again["expires_at"]
        assert again["usage"]["cached_tokens"] == BLOCKS * BLOCK
        assert again["usage"]["cache_write_tokens"] == 0
        assert len(await client.pins()) == 1
        assert client.book.total == BLOCKS


async def test_its_time_ends_the_pin_everywhere(tiny_model: Path, redis_url: str) -> None:
    async with client_of(tiny_model, redis_url, **SMALL) as client:
        await client.pin(ttl=1)
        assert client.book.total == BLOCKS
        await client.cluster.until(lambda: client.book.total == 0)
        while await client.pins():
            await asyncio.sleep(0.05)


async def test_a_pin_that_died_with_its_worker_comes_back_with_its_next_use(
    tiny_model: Path, redis_url: str
) -> None:
    async with client_of(tiny_model, redis_url, **SMALL) as client:
        assert (await client.pin()).status_code == 200
        cluster = client.cluster
        (pool,) = [one for one in cluster.config.pools if one.name == "prefill"]
        await cluster.workers["prefill-0"].stop()
        await cluster.start_worker(pool, "prefill-0")
        assert client.book.total == 0
        await cluster.until(
            lambda: (
                [one.record.slot for one in cluster.dispatcher.workers.up("prefill")]
                == ["prefill-0"]
            )
        )
        read, written = await client.ask()
        assert (read, written) in {(0, BLOCKS * BLOCK), (BLOCKS * BLOCK, 0)}
        assert client.book.total == BLOCKS
        await client.fill_the_pool()
        assert await client.ask() == (BLOCKS * BLOCK, 0)


async def test_beyond_the_tenant_s_share_it_is_refused_with_the_numbers(
    tiny_model: Path, redis_url: str
) -> None:
    small = (TenantConfig(name="default", max_pinned_fraction=0.03),)
    async with client_of(tiny_model, redis_url, tenants=small, **SMALL) as client:
        context = client.cluster.workers["prefill-0"].context
        assert context is not None
        share = int(0.03 * context.engine.pool.total)
        assert share < BLOCKS
        answer = await client.pin()
        assert answer.status_code == 409, answer.text
        error = answer.json()["error"]
        assert error["code"] == "cache_share_exceeded"
        assert f"has {BLOCKS} KV blocks" in error["message"]
        assert f"may pin {share} of" in error["message"]
        assert await client.pins() == []
        assert client.book.total == 0
        # What asks for less than a pin gets as much as there is room for.
        body = {"model": "tiny", "prompt": list(PREFIX), "max_tokens": 1}
        wish = {"prompt_cache_retention": "24h"}
        told = (await client.http.post("/v1/completions", json=body | wish)).json()["usage"]
        assert told["prompt_tokens_details"]["cache_write_tokens"] == share * BLOCK
        assert client.book.total == share


async def test_all_tenants_together_leave_room(tiny_model: Path, redis_url: str) -> None:
    async with client_of(tiny_model, redis_url, max_pinned_fraction=0.0, **SMALL) as client:
        assert (await client.pin()).status_code == 409


async def test_pins_of_another_tenant_are_not_there(tiny_model: Path, redis_url: str) -> None:
    fields: dict[str, Any] = {
        "tenants": (TenantConfig(name="acme"), TenantConfig(name="rival")),
        "keys": (key("ann", "acme"), key("amy", "acme"), key("rob", "rival")),
        "require_key": True,
    }
    async with client_of(tiny_model, redis_url, **fields, **SMALL) as client:
        pinned = (await client.pin(as_key="ann")).json()
        assert [one["id"] for one in await client.pins("amy")] == [pinned["id"]]
        assert await client.pins("rob") == []
        assert await client.unpin(pinned["id"], "rob") == 404
        assert await client.ask("rob") == (0, 0)
        other = (await client.pin(as_key="rob")).json()
        assert other["id"] != pinned["id"], "the id of a prefix tells one tenant what another pins"
        assert other["usage"]["cached_tokens"] == BLOCKS * BLOCK
        assert await client.unpin(other["id"], "rob") == 200
        assert [one["id"] for one in await client.pins("ann")] == [pinned["id"]]
        await client.fill_the_pool()
        assert await client.ask("ann") == (BLOCKS * BLOCK, 0)
        assert (await client.http.get(PATH)).status_code == 401


async def test_a_tenant_s_time_to_live_forgets_unused_blocks(
    tiny_model: Path, redis_url: str
) -> None:
    tenants = (TenantConfig(name="default", cache_ttl_s=1.0),)
    async with client_of(tiny_model, redis_url, tenants=tenants, heartbeat_s=0.2) as client:
        await client.ask()
        assert (await client.ask())[0] == BLOCKS * BLOCK
        pools = [one.context.engine.pool for one in client.cluster.workers.values() if one.context]
        assert all(pool.counts().cached for pool in pools)
        await client.cluster.until(lambda: not any(pool.counts().cached for pool in pools))
        assert (await client.ask())[0] == 0


WRONG: list[tuple[dict[str, Any], str | None]] = [
    ({}, "prompt"),
    ({"prompt": "x", "messages": [{"role": "user", "content": "x"}]}, "prompt"),
    ({"prompt": "a word", "tools": [{"type": "function"}]}, "tools"),
    ({"prompt": "a word", "ttl": 0}, "ttl"),
    ({"prompt": "a word", "ttl": 86_401}, "ttl"),
    ({"prompt": "a word", "name": "x" * 65}, "name"),
    ({"prompt": [5] * (BLOCK - 1)}, None),
]
"""Bodies, and the field that is named."""


async def test_what_is_wrong_with_a_pin_is_named(tiny_model: Path, redis_url: str) -> None:
    async with client_of(tiny_model, redis_url, **SMALL) as client:
        for body, param in WRONG:
            answer = await client.http.post(PATH, json=body)
            assert answer.status_code == 400, answer.text
            error = answer.json()["error"]
            assert (error["param"] or "").split("[")[0] == (param or "")


async def test_pins_are_kept_in_redis_until_the_last_has_expired(redis_url: str) -> None:
    now = [1000.0]
    async with redis_client(redis_url) as client:
        store = PinStore(client, "pins-test", clock=lambda: now[0])
        short, long = pin([b"a" * 16], expires_at=1010.0), pin([b"b" * 16], expires_at=1100.0)
        await store.write(long)
        await store.write(short)
        assert {one.id for one in await store.read()} == {short.id, long.id}
        assert 90 < await client.ttl("baton:{pins-test}:pins") <= 101
        now[0] = 1010.0
        assert [one.id for one in await store.read()] == [long.id]
        await client.hset("baton:{pins-test}:pins", "broken", "{}")
        assert [one.id for one in await store.read()] == [long.id]
        await store.write(long)
        assert await client.hlen("baton:{pins-test}:pins") == 1
        await store.remove(long.id)
        assert await store.read() == []
        await store.write(long)
        await store.clear()
        assert await client.exists("baton:{pins-test}:pins") == 0
