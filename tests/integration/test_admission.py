"""Admission with real workers: its promises of a cluster in virtual time, on the tiny engine."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from baton.config.access import TenantConfig
from baton.errors import Overloaded
from baton.request import Principal
from router.admission import capacity, inflight_prefills
from router.core.request import OutputDelta
from tests.support.integration.handoff import prompt_of
from tests.support.integration.moves import LONG
from tests.support.mini_cluster import collect, mini_cluster

SHORT = replace(LONG, max_tokens=4)
IDLE_S = 0.1


@pytest.mark.parametrize("admission", ["queue", "slo"])
async def test_after_a_burst_and_idleness_any_prompt_is_answered(
    tiny_model: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, admission: str
) -> None:
    for module in (inflight_prefills, capacity):
        monkeypatch.setattr(module, "IDLE_S", IDLE_S)
    async with mini_cluster(
        tiny_model, redis_url, kv_pool_mib=8, admission=admission, slo_ttft_s=0.02
    ) as cluster:
        burst = await asyncio.gather(
            *(cluster.answer(prompt_of(300, salt), SHORT) for salt in range(40)),
            return_exceptions=True,
        )
        refused = [one for one in burst if isinstance(one, Overloaded)]
        assert sum(isinstance(one, OutputDelta) for one in burst) + len(refused) == 40
        assert admission == "slo" or not refused
        await cluster.until_idle()
        await asyncio.sleep(2 * IDLE_S)
        # Longer than all before, and far beyond the SLO.
        answer = await cluster.answer(prompt_of(480, 99), SHORT)
        assert len(answer.token_ids) == SHORT.max_tokens


async def test_tenants_share_the_queue_by_weight(tiny_model: Path, redis_url: str) -> None:
    tenants = (TenantConfig(name="light", weight=1), TenantConfig(name="heavy", weight=4))
    order: list[str] = []
    async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8, tenants=tenants) as cluster:

        async def ask(tenant: str, salt: int) -> None:
            request = cluster.request(prompt_of(400, salt), SHORT)
            await collect(
                cluster.dispatcher.generate(replace(request, principal=Principal(tenant)))
            )
            order.append(tenant)

        await asyncio.gather(
            *(
                ask(tenant, 100 * place + salt)
                for place, tenant in enumerate(("light", "heavy"))
                for salt in range(20)
            )
        )
    # By when the heavy tenant is served, the light one has had about a quarter as much.
    last = max(place for place, tenant in enumerate(order) if tenant == "heavy")
    assert order[: last + 1].count("light") <= 12
