"""Runs the shifting traffic on live clusters of timed workers: with each fixed ratio of roles, and
with the autoscaler."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from baton.errors import Unavailable
from baton.host.background import end_tasks
from loadtest.common.child_processes import LOOPBACK, free_port, last_lines, process_group
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.generator.load_driver import LoadDriver
from loadtest.generator.targets.openai_target import OpenAiTarget
from loadtest.generator.targets.target import AskOptions
from loadtest.research.shifting import scenario
from loadtest.research.shifting.outcome import AUTOSCALED, Outcome, outcome
from loadtest.research.shifting.scenario import COSTS, REST_S, WARM_UP, ShiftingTraffic

_PROGRAM = "loadtest.research.validation.timed_up"
_READY_S = 240.0
_ROLE_S = 60.0
_POLL_S = 0.2


class LiveCluster:
    """A live cluster that is ready. Its methods raise Unavailable. Owned by one event loop."""

    def __init__(self, http: str, client: httpx.AsyncClient) -> None:
        self.url = f"http://{http}"
        self._client = client

    async def roles(self) -> dict[str, str]:
        """Return the role of each worker that a router knows, by slot."""
        try:
            answer = await self._client.get(f"{self.url}/v1/cache/stats")
            return {worker["slot"]: worker["role"] for worker in answer.json()["workers"]}
        except (httpx.HTTPError, ValueError, KeyError) as error:
            raise Unavailable(f"{self.url} does not return its workers' roles: {error}") from error

    async def take_ratio(self, prefill: int) -> None:
        """Change roles until ``prefill`` workers have the prefill role, and all others the decode
        role.
        """
        roles = await self.roles()
        own = sorted(slot for slot, role in roles.items() if role == "prefill")
        others = sorted(slot for slot, role in roles.items() if role == "decode")
        for slot in others[: max(0, prefill - len(own))]:
            await self._change(slot, "prefill")
        for slot in own[prefill:]:
            await self._change(slot, "decode")
        await self.until({"prefill": prefill, "decode": len(roles) - prefill})

    async def until(self, counts: Mapping[str, int], patience_s: float = _ROLE_S) -> None:
        """Wait until each role has the number of workers that ``counts`` gives it."""
        deadline = time.monotonic() + patience_s
        while Counter((await self.roles()).values()) != Counter(counts):
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"the roles are {await self.roles()} instead of {dict(counts)} after the "
                    "timeout"
                )
            await asyncio.sleep(_POLL_S)

    async def _change(self, slot: str, role: str) -> None:
        url = f"{self.url}/v1/workers/{slot}/role"
        try:
            answer = await self._client.post(url, json={"role": role})
        except httpx.HTTPError as error:
            raise Unavailable(f"cannot change the role of {slot}: {error}") from error
        if not answer.is_success:
            raise Unavailable(f"cannot change the role of {slot}: {answer.text}")


@contextlib.asynccontextmanager
async def live_cluster(
    prefill: int, decode: int, fields: Mapping[str, Any], folder: Path
) -> AsyncIterator[LiveCluster]:
    """Run a cluster during the block. ``fields`` are its configuration, and its files are in
    ``folder``.
    """
    http, grpc = (f"{LOOPBACK}:{free_port()}" for _ in range(2))
    config, log = folder / "cluster.toml", folder / "cluster.log"
    config.write_text(toml_of(fields))
    command = [sys.executable, "-P", "-m", _PROGRAM, "--config", str(config)]
    command += ["--prefill", str(prefill), "--decode", str(decode), "--http", http, "--grpc", grpc]
    command += [
        f"--prefill-costs={_numbers(COSTS.prefill)}",
        f"--step-costs={_numbers(COSTS.step)}",
    ]
    with process_group(command, os.environ, log) as process:
        async with httpx.AsyncClient(trust_env=False, timeout=_ROLE_S) as client:
            cluster = LiveCluster(http, client)
            deadline = time.monotonic() + _READY_S
            while not await _is_healthy(cluster.url, client):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise Unavailable(f"the cluster does not start:\n{last_lines(log)}")
                await asyncio.sleep(_POLL_S)
            await cluster.until({"prefill": prefill, "decode": decode}, _READY_S)
            yield cluster


def toml_of(fields: Mapping[str, Any]) -> str:
    """Return ``fields`` as TOML: first the plain values, then a table for each mapping. Plain
    values must be texts or numbers.
    """
    plain = [f"{name} = {json.dumps(value)}" for name, value in fields.items() if _plain(value)]
    tables = [f"[{name}]\n{toml_of(value)}" for name, value in fields.items() if not _plain(value)]
    return "\n".join([*plain, *tables]) + "\n"


def _plain(value: object) -> bool:
    return not isinstance(value, Mapping)


def _numbers(values: tuple[float, ...]) -> str:
    return ",".join(f"{value:g}" for value in values)


async def _is_healthy(url: str, client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get(f"{url}/health")).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


Say = Callable[[str], None]

_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class RolesSeen:
    """Numbers of workers in the prefill and the decode role, at one moment of a run."""

    at_s: float
    prefill: int
    decode: int


async def drive(cluster: LiveCluster, traffic: ShiftingTraffic, name: str, run: int) -> Outcome:
    """Send the traffic to a cluster, and return the results. Each ``run`` number gives new prompts,
    so that no prompt is cached.
    """
    target = OpenAiTarget(cluster.url, "completions", AskOptions(SERVED_NAME))
    driver = LoadDriver(target)
    try:
        records = await driver.open_loop(traffic.planned(run))
    finally:
        await target.close()
    late = sorted(driver.loop_lag_s)
    late_s = late[int(0.99 * (len(late) - 1))] if late else 0.0
    return outcome(name, records, traffic, scenario.SLO, late_s)


async def fixed_ratios(
    traffic: ShiftingTraffic, ratios: Sequence[tuple[int, int]], local: str, folder: Path, say: Say
) -> list[Outcome]:
    """Measure each ratio of prefill to decode workers on one cluster, and return the results.
    Between two ratios, commands change the roles of workers.
    """
    found = []
    half = scenario.WORKERS // 2
    fields = scenario.fields(autoscaled=False, local_prefill=local)
    async with live_cluster(half, scenario.WORKERS - half, fields, folder) as cluster:
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
    """Measure a cluster with the autoscaler. It begins with as many prefill as decode workers.
    Return the results, and the numbers of workers in each role over time.
    """
    half = scenario.WORKERS // 2
    fields = scenario.fields(autoscaled=True, local_prefill=local)
    async with live_cluster(half, scenario.WORKERS - half, fields, folder) as cluster:
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
    """Add an entry to ``seen`` whenever the workers' roles have changed."""
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
