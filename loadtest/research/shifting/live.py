"""The shifting traffic on live clusters of timed workers: each fixed ratio, and the autoscaler.

One client process drives one cluster at a time. Owned by the event loop that it runs on.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.errors import Unavailable
from baton.host.background import end_tasks
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.generator.load_driver import LoadDriver
from loadtest.generator.targets.openai_target import OpenAiTarget
from loadtest.generator.targets.target import AskOptions
from loadtest.research.shifting import case
from loadtest.research.shifting.live_cluster import LiveCluster, live_cluster
from loadtest.research.shifting.outcome import AUTOSCALED, Outcome, outcome
from loadtest.research.shifting.traffic import REST_S, WARM_UP, ShiftingTraffic

Say = Callable[[str], None]

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class RolesSeen:
    """How many workers played each role at a moment of a run."""

    at_s: float
    prefill: int
    decode: int


async def drive(cluster: LiveCluster, traffic: ShiftingTraffic, name: str, run: int) -> Outcome:
    """One run; another ``run`` has prompts that no cache knows."""
    target = OpenAiTarget(cluster.url, "completions", AskOptions(SERVED_NAME))
    driver = LoadDriver(target)
    try:
        records = await driver.open_loop(traffic.planned(run))
    finally:
        await target.close()
    late = sorted(driver.loop_lag_s)
    late_s = late[int(0.99 * (len(late) - 1))] if late else 0.0
    return outcome(name, records, traffic, case.SLO, late_s)


async def fixed_ratios(
    traffic: ShiftingTraffic, ratios: Sequence[tuple[int, int]], local: str, folder: Path, say: Say
) -> list[Outcome]:
    """One cluster, whose roles are changed by hand between the runs."""
    found = []
    half = case.WORKERS // 2
    fields = case.fields(autoscaled=False, local_prefill=local)
    async with live_cluster(half, case.WORKERS - half, fields, folder) as cluster:
        await drive(cluster, WARM_UP, "", 0)
        for run, (prefill, decode) in enumerate(ratios, start=1):
            await cluster.take_ratio(prefill)
            await asyncio.sleep(REST_S)
            found.append(await drive(cluster, traffic, f"{prefill}P{decode}D", run))
            say(f"{found[-1].name}: {found[-1].goodput_per_s:.2f} good requests/s")
    return found


async def autoscaled(
    traffic: ShiftingTraffic, local: str, folder: Path, say: Say
) -> tuple[Outcome, list[RolesSeen]]:
    """A cluster that begins with as many workers of each role, and what it made of them."""
    half = case.WORKERS // 2
    fields = case.fields(autoscaled=True, local_prefill=local)
    async with live_cluster(half, case.WORKERS - half, fields, folder) as cluster:
        await drive(cluster, WARM_UP, "", 0)
        await asyncio.sleep(REST_S)
        seen: list[RolesSeen] = []
        watching = asyncio.create_task(_watch(cluster, seen), name="roles")
        try:
            found = await drive(cluster, traffic, AUTOSCALED, 1)
        finally:
            await end_tasks([watching])
    say(f"{found.name}: {found.goodput_per_s:.2f} good requests/s")
    return found, seen


async def _watch(cluster: LiveCluster, seen: list[RolesSeen]) -> None:
    """Add a line whenever the roles have changed."""
    began = time.monotonic()
    while True:
        try:
            roles = Counter((await cluster.roles()).values())
        except Unavailable:
            roles = Counter()
        now = RolesSeen(time.monotonic() - began, roles["prefill"], roles["decode"])
        if roles and (not seen or (seen[-1].prefill, seen[-1].decode) != (now.prefill, now.decode)):
            seen.append(now)
        await asyncio.sleep(_LOOK_S)
