"""Routers as far as they bill, before a real Redis and a dispatcher that is scripted."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import redis.asyncio
from starlette.types import ASGIApp

from baton.config.access import KeyConfig
from baton.host.background import end_tasks
from baton.request import Principal
from router.access.access import Access
from router.access.rate_limits import RateLimits
from router.access.visit import Visit
from router.billing.ledger import Ledger
from router.billing.prices import BillLine
from router.usage.api import UsageApi
from router.usage.usage_store import UsageStore
from router.workers.worker_links import WorkerLinks
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
        self.ledger.settle(
            WHO,
            more.get("agent", ""),
            answer_id,
            hold,
            self.lines(*tokens),
            more.get("fingerprint", ""),
        )
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

    def application(self) -> ASGIApp:
        front, config = self.front, self.front.config
        links = cast(WorkerLinks, SimpleNamespace(all=list))
        usage = UsageApi(self.store, self.budgets, links, self.access, config, self.unix_clock)
        parts = (front.dispatcher, front.tokenizer, MODEL, front.stats, config, self.access)
        return create_app(*parts, more=(usage,))

    @asynccontextmanager
    async def app(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.application())
        async with httpx.AsyncClient(
            transport=transport, base_url="http://127.0.0.1", headers=SHOWN
        ) as http:
            yield http


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


def bills(folder: Path) -> list[Path]:
    return sorted((folder / "bills").glob("*"))


async def until_reported(router: Router) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while router.ledger._settled < router.ledger._written:
            await asyncio.sleep(0.01)
