"""What is done to a cluster while it answers. Each fault is over when its function returns."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager

from baton.errors import BatonError
from router.workers.worker_link import WorkerLink
from tests.fuzz.answers.cluster import MODELS, ROLES, FuzzedCluster
from tests.support.integration.redis_away import stopped

_DRAIN_S = (0.5, 3.0, 10.0)
"""Deadlines of drains, in seconds. What still runs at a short one moves to other workers."""
_FINISH_S = 20.0
"""Deadline of a worker's drain that may be the last one of its model: its answers end there."""


@contextmanager
def _kept(cluster: FuzzedCluster, slot: str) -> Iterator[None]:
    """Keep a worker from other faults."""
    cluster.busy.add(slot)
    try:
        yield
    finally:
        cluster.busy.discard(slot)


def _link(cluster: FuzzedCluster, source: random.Random) -> WorkerLink | None:
    """Choose a connection of a router to a worker."""
    links = sorted(source.choice(cluster.routers).workers.all(), key=lambda one: one.record.slot)
    return source.choice(links) if links else None


async def break_tokens(cluster: FuzzedCluster, source: random.Random) -> None:
    """A router's stream of tokens from one worker breaks."""
    link = _link(cluster, source)
    if link is not None and link.token_stream is not None:
        cluster.log(f"token stream of {link.record.slot} breaks")
        cluster.excuse()
        link.token_stream.cancel()


async def break_prefills(cluster: FuzzedCluster, source: random.Random) -> None:
    """A router's stream of prefills at one worker breaks."""
    link = _link(cluster, source)
    if link is not None and link.prefills._life is not None:
        cluster.log(f"prefill stream of {link.record.slot} breaks")
        cluster.losses.append(cluster.now)
        link.prefills._life.cancel()


async def break_pair(cluster: FuzzedCluster, source: random.Random) -> None:
    """The stream between two workers breaks."""
    slot = source.choice(cluster.free())
    context = cluster.mini.workers[slot].context
    assert context is not None
    pairs = list(context.exchange._pairs._pairs.values())
    if pairs:
        cluster.log(f"a pair of {slot} breaks")
        await source.choice(pairs).close()


async def kill(cluster: FuzzedCluster, source: random.Random) -> None:
    """A worker ends at once, and is started again."""
    slot = source.choice(cluster.free())
    with _kept(cluster, slot):
        await cluster.kill(slot)


async def drain(cluster: FuzzedCluster, source: random.Random) -> None:
    """A worker is replaced by another one of its model, as in a rolling restart."""
    slot = source.choice(cluster.free())
    with _kept(cluster, slot):
        await cluster.replace(slot, source.choice(_DRAIN_S))


async def change_role(cluster: FuzzedCluster, source: random.Random) -> None:
    """A worker takes the other role for a while."""
    slot = source.choice(cluster.free())
    worker = cluster.mini.workers[slot]
    with _kept(cluster, slot):
        own = worker.settings.pool.role
        for role in (next(one for one in ROLES if one != own), own):
            cluster.log(f"{slot} becomes {role}")
            cluster.excuse()
            await worker.change_role(role, source.choice(_DRAIN_S))
            await asyncio.sleep(source.uniform(0.2, 1.0))


async def flush(cluster: FuzzedCluster, source: random.Random) -> None:
    """Redis loses everything."""
    cluster.log("Redis is emptied")
    await cluster.mini.redis.flushdb()


async def pause_redis(cluster: FuzzedCluster, source: random.Random) -> None:
    """Redis stands still: for less than its workers' leases, or longer."""
    seconds = source.choice((0.5, 2.0, 6.0))
    cluster.log(f"Redis stands still for {seconds:.1f} s")
    with stopped(cluster.mini.redis_url):
        await asyncio.sleep(seconds)
    cluster.log("Redis goes on")


async def change_routers(cluster: FuzzedCluster, source: random.Random) -> None:
    """A second router comes; or it leaves, when its requests have ended."""
    if len(cluster.routers) == 1:
        cluster.log("a second router comes")
        await cluster.add_router()
        return
    router = cluster.routers.pop()
    cluster.log("the second router leaves")
    router.leave()
    await router.until_idle()
    await router.close()


async def change_model(cluster: FuzzedCluster, source: random.Random) -> None:
    """Workers of the other model take the place of all that serve, one by one.

    The first of each role come before an old worker leaves: without local prefill, neither model
    could serve a whole request otherwise."""
    cluster.model = next(one for one in MODELS if one != cluster.model)
    cluster.log(f"new workers serve the {cluster.model} model")
    slots = cluster.free()
    source.shuffle(slots)
    for role in ROLES:
        fresh = await cluster.start(role)
        cluster.log(f"{fresh} serves the {cluster.model} model")
    for role in ROLES:
        slot = next((one for one in slots if one in cluster.free(role)), "")
        if slot:
            with _kept(cluster, slot):
                await cluster.retire(slot, _FINISH_S)
    for slot in slots:
        if slot in cluster.free():
            with _kept(cluster, slot):
                await cluster.replace(slot, _FINISH_S, patient=True)


Strike = Callable[[FuzzedCluster, random.Random], Awaitable[None]]
KINDS: Mapping[str, Strike] = {
    "token stream breaks": break_tokens,
    "prefill stream breaks": break_prefills,
    "pair breaks": break_pair,
    "worker killed": kill,
    "worker drained": drain,
    "role changed": change_role,
    "Redis flushed": flush,
    "Redis paused": pause_redis,
    "routers change": change_routers,
    "model changes": change_model,
}
LONG = frozenset({"model changes"})
"""Kinds that run next to others."""


async def strike_on(
    cluster: FuzzedCluster, source: random.Random, kinds: tuple[str, ...], until: float
) -> int:
    """Strike the cluster again and again until ``until``, in seconds of the round. Return how
    often. Raises what a fault raises that is no refusal by the cluster."""
    struck = 0
    alongside: asyncio.Task[None] | None = None
    while cluster.now < until:
        await asyncio.sleep(source.uniform(0.2, 1.0))
        kind = source.choice(kinds)
        # Its own: what runs alongside draws at times that no seed decides.
        own = random.Random(source.getrandbits(64))
        if kind in LONG:
            if alongside is not None and not alongside.done():
                continue
            alongside = asyncio.create_task(_strike(cluster, own, kind), name=kind)
        elif cluster.free():
            await _strike(cluster, own, kind)
        struck += 1
    if alongside is not None:
        await alongside
    return struck


async def _strike(cluster: FuzzedCluster, source: random.Random, kind: str) -> None:
    try:
        await KINDS[kind](cluster, source)
    except BatonError as error:
        cluster.log(f"{kind}: refused: {error}")
