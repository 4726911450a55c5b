"""Workers that run out of descriptors or memory: others do their work, and they come back."""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from decode_worker.role import DecodeRole
from tests.support.integration.handoff import prompt_of
from tests.support.integration.moves import LONG, Asked, moved
from tests.support.mini_cluster import MiniCluster, mini_cluster

SHORT = replace(LONG, max_tokens=6)


def no_descriptor(*_: Any) -> NoReturn:
    raise OSError(errno.EMFILE, "Too many open files")


def no_memory(*_: Any) -> NoReturn:
    raise MemoryError


def exhaust(cluster: MiniCluster, slot: str, patch: pytest.MonkeyPatch) -> None:
    """A prefill worker opens no more connections, a decode worker promises no more blocks."""
    worker = cluster.workers[slot]
    assert worker.context is not None
    if slot.startswith("prefill"):
        patch.setattr(worker.context.exchange, "outbound", no_descriptor)
    else:
        role = worker.session.role
        assert isinstance(role, DecodeRole)
        patch.setattr(role.receiver, "reserve", no_memory)


@pytest.mark.parametrize("slot", ["prefill-0", "decode-0"])
async def test_what_a_worker_lacks_costs_no_request(
    tiny_model: Path, redis_url: str, slot: str
) -> None:
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, decode=2, kv_pool_mib=8, policy="round_robin"
    ) as cluster:
        links = cluster.dispatcher.workers
        await cluster.until(lambda: len(links.up("prefill") + links.up("decode")) == 4)
        asked = [Asked(prompt_of(60, number), SHORT) for number in range(9)]
        with pytest.MonkeyPatch.context() as patch:
            exhaust(cluster, slot, patch)
            await asyncio.gather(*(each.run(cluster) for each in asked[:8]))
            assert moved(cluster, "handoff_failed") > 0
        (link,) = (one for one in links.all() if one.record.slot == slot)
        await cluster.until(lambda: links.is_up(link))
        await asked[8].run(cluster)
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)
