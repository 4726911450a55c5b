"""What the cluster itself has counted, from its /metrics pages."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.chaos.harness.cluster import Cluster, series

_TRIES = 20
_AGAIN_S = 0.25


async def by_label(cluster: Cluster, name: str, label: str) -> dict[str, int]:
    """A counter of the routers, summed over all that have counted in it, by one of its labels.

    Raises ``httpx.HTTPError`` where no router answers.
    """
    found: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(await _routers_page(cluster)):
        for sample in family.samples:
            if sample.name == name:
                found[sample.labels[label]] += sample.value
    return {key: int(value) for key, value in sorted(found.items()) if value}


async def pulled_blocks(cluster: Cluster) -> dict[str, float]:
    """KV blocks that each worker has fetched from others since it began, by slot."""
    found = {}
    for worker in await cluster.workers():
        try:
            page = await cluster.page(worker.record.metrics_address)
        except httpx.HTTPError:
            continue
        found[worker.slot] = series(page, "baton_pulled_blocks_total")
    return found


async def _routers_page(cluster: Cluster) -> str:
    for _ in range(_TRIES - 1):
        try:
            return await cluster.page(cluster.fronts.http)
        except httpx.HTTPError:
            await asyncio.sleep(_AGAIN_S)
    return await cluster.page(cluster.fronts.http)
