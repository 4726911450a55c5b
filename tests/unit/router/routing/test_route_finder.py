"""The table follows the links."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from baton.request import LoadSnapshot
from router.routing.ledger import Ledger
from router.routing.policies import make_policy
from router.routing.policy import RouteSettings
from router.routing.route_finder import REFRESH_S, TableSync
from router.workers.worker_links import WorkerLinks
from tests.support.router.workers import BLOCK, record


@asynccontextmanager
async def synced(*slots: str) -> AsyncIterator[tuple[TableSync, Ledger, WorkerLinks]]:
    """Links that nobody answers, said to be connected."""
    links = WorkerLinks("r", heartbeat_s=1.0)
    ledger = Ledger(make_policy("predictive", RouteSettings()), BLOCK)
    try:
        links.update({slot: record(slot) for slot in slots})
        for link in links.all():
            link.connected = True
        yield TableSync(ledger, links), ledger, links
    finally:
        await links.close()


async def test_workers_come_go_and_change() -> None:
    async with synced("p-0", "p-1", "d-0") as (sync, ledger, links):
        now = time.monotonic()
        sync.refresh(now)
        table = ledger.table
        assert len(table.group("prefill")) == 2
        assert (sync.context_length, sync.fingerprint) == (8192, "f")
        first = links.get("p-0")
        assert first is not None
        first.connected = False
        first.load = LoadSnapshot(running=3)
        sync.refresh(now + REFRESH_S / 2)
        assert len(table.group("prefill")) == 2, "the table may be a little old"
        sync.refresh(now + REFRESH_S / 2, at_once=True)
        assert [table.names[r] for r in table.group("prefill").rows] == ["p-1"]
        assert table.sequences[table.row("p-0")] == 3
        links.update({"p-1": replace(record("p-1"), context_length=100), "d-0": record("d-0")})
        sync.refresh(now + 1)
        assert "p-0" not in table
        assert sync.context_length == 100


async def test_a_call_that_failed_takes_a_worker_out() -> None:
    async with synced("p-0", "p-1", "d-0") as (sync, ledger, links):
        table = ledger.table
        link = links.get("p-0")
        assert link is not None
        link.failed(time.monotonic())
        sync.refresh(0.0)
        assert [table.names[r] for r in table.group("prefill").rows] == ["p-1"]
