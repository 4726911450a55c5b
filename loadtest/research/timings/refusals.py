"""Measures what a router's refusals cost, and whether a flood of them holds its event loop.

    python -m loadtest.research.timings.refusals

A router, its store and two timed workers run. Requests that never end fill the batch and the queue.
Then each kind of refused request is sent, one after the other over one connection, in turns with
the other kinds. *CPU* is the router's, per request: the median over the turns. The ratio is to the
refusal by a key's rate with the same prompt, which is found before the body is read.

At last clients send long prompts to the full queue as fast as they can. *Lag* is that of the
router's event loop meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import httpx
import numpy as np
import typer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from baton.config.access import KeyConfig
from baton.errors import Unavailable
from baton.host.background import end_tasks
from loadtest.common.bench_app import Figures, bench_app, say
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.research.timed.cluster import TimedCluster, TimedSettings, timed_cluster
from planning.common.report import print_whole, this_machine, whole_table, write_json
from worker.costs.step_costs import StepCosts

MAX_RATIO = 1.1
"""Limit of the CPU time of a full queue's refusal, divided by that of a rate limit's."""
MAX_LAG_S = 0.025
"""Limit of the event loop's lag, p99, during the flood. A bucket of its histogram ends here."""
_OPERATOR = {"authorization": "Bearer operator"}
_KEYS = {"free": 0, "limited": 1, "operator": 0}
"""Requests per minute of each API key; 0: no limit."""
_SHORT, _LONG = "word " * 20, "word " * 10_000
_FILLING_S = 60.0
_ANSWER_S = 600.0
"""Maximum pause between two events of an answer that fills the queue, in seconds."""
_PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of request that is refused."""

    name: str
    status: int
    key: str
    prompt: str
    fields: Mapping[str, Any] | None = None
    compared: bool = False
    """Whether its cost is compared with that of a rate limit's refusal of the same prompt."""

    def body(self) -> bytes:
        """Return the request's body."""
        fields = {"model": SERVED_NAME, "prompt": self.prompt, **(self.fields or {})}
        return json.dumps(fields).encode()


KINDS = (
    Kind("401: unknown key", 401, "nonsense", _SHORT),
    Kind("400: bad field", 400, "free", _SHORT, {"temperature": "hot", "priority": 0}),
    Kind("429: rate of the key, 20 words", 429, "limited", _SHORT),
    Kind("429: rate of the key, 10,000 words", 429, "limited", _LONG),
    Kind("429: full queue, 20 words", 429, "free", _SHORT, compared=True),
    Kind("429: full queue, 10,000 words", 429, "free", _LONG, compared=True),
    Kind("429: full queue, 10,000 words, read", 429, "free", _LONG, {"priority": 0}),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Cost of one kind of refusal."""

    name: str
    cpu_ms: float
    """The router's CPU time per request, in milliseconds."""
    ratio: float | None
    """This divided by the cost of a rate limit's refusal; None if they are not compared."""


@dataclass(frozen=True, slots=True)
class Flood:
    """A flood of long prompts to a full queue."""

    refused_per_s: float
    lag_p99_s: float
    """Upper bound of the bucket that has the 99th percentile of the event loop's lag."""


def settings() -> TimedSettings:
    """Return the settings of the cluster: one place in its batch, and one in its queue."""
    keys = tuple(
        KeyConfig(
            name=name,
            sha256=hashlib.sha256(name.encode()).hexdigest(),
            tenant="default",
            requests_per_minute=limit,
            scopes=("inference", "admin") if name == "operator" else ("inference",),
        )
        for name, limit in _KEYS.items()
    )
    config = {
        "keys": keys,
        "require_key": True,
        "max_waiting_requests": 1,
        "max_queue_s": 1e6,
        "local_prefill": "never",
    }
    costs = StepCosts((1.0, 0.01, 0.0), (200.0, 0.0, 0.0))
    return TimedSettings(
        *(1, 1, costs), max_sequences=1, kv_pool_mib=16, operator_key="operator", config=config
    )


@asynccontextmanager
async def full_queue(cluster: TimedCluster) -> AsyncIterator[None]:
    """Keep the queue full during the block. Raises Unavailable if it does not get full."""
    url = f"http://{cluster.router.http}"
    body = {"model": SERVED_NAME, "prompt": "word", "max_tokens": 10_000, "ignore_eos": True}

    async def fill() -> None:
        headers = {"authorization": "Bearer free"}
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=_ANSWER_S) as http:
            while True:
                async with http.stream(
                    "POST", _PATH, json=body | {"stream": True}, headers=headers
                ) as answer:
                    async for _ in answer.aiter_bytes():
                        pass
                await asyncio.sleep(0.05)

    tasks = [asyncio.create_task(fill()) for _ in range(3)]
    try:
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as http:
            deadline = time.monotonic() + _FILLING_S
            while await _value(http, "baton_waiting_requests") < 1:
                if time.monotonic() > deadline:
                    raise Unavailable("the queue does not get full")
                await asyncio.sleep(0.1)
        yield
    finally:
        await end_tasks(tasks)


async def _value(http: httpx.AsyncClient, name: str) -> float:
    return sum((await _samples(http, name)).values())


async def _samples(http: httpx.AsyncClient, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of a series by the values of its labels."""
    text = (await http.get("/metrics", headers=_OPERATOR)).text
    return {
        tuple(sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


async def measure_costs(cluster: TimedCluster, turns: int, requests: int) -> list[Row]:
    """Measure the cost of each kind of refusal. Raises Unavailable if a request has another answer
    than expected.
    """
    found: dict[str, list[float]] = {kind.name: [] for kind in KINDS}
    url = f"http://{cluster.router.http}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as http:
        # The limit's only request of the minute.
        await http.post(_PATH, json={}, headers={"authorization": "Bearer limited"})
        for turn in range(turns):
            for kind in KINDS:
                found[kind.name].append(await _cost_ms(cluster, http, kind, requests))
            say(f"turn {turn + 1}: { ({name: round(one[-1], 2) for name, one in found.items()}) }")
    cpu_ms = {name: float(np.median(one)) for name, one in found.items()}
    return [Row(kind.name, cpu_ms[kind.name], _ratio(kind, cpu_ms)) for kind in KINDS]


def _ratio(kind: Kind, cpu_ms: Mapping[str, float]) -> float | None:
    if not kind.compared:
        return None
    by_rate = next(one for one in KINDS if one.key == "limited" and one.prompt == kind.prompt)
    return cpu_ms[kind.name] / cpu_ms[by_rate.name]


async def _cost_ms(
    cluster: TimedCluster, http: httpx.AsyncClient, kind: Kind, requests: int
) -> float:
    body = kind.body()
    headers = {"authorization": f"Bearer {kind.key}", "content-type": "application/json"}
    before = sum(cluster.router.process.cpu_times()[:2])
    for _ in range(requests):
        answer = await http.post(_PATH, content=body, headers=headers)
        if answer.status_code != kind.status:
            raise Unavailable(f"{kind.name}: {answer.status_code} {answer.text}")
    return (sum(cluster.router.process.cpu_times()[:2]) - before) / requests * 1e3


async def measure_flood(cluster: TimedCluster, seconds: float, clients: int) -> Flood:
    """Send long prompts to the full queue from several clients, as fast as they can."""
    url = f"http://{cluster.router.http}"
    kind = next(one for one in KINDS if one.compared and one.prompt == _LONG)
    body, refused = kind.body(), 0
    headers = {"authorization": "Bearer free", "content-type": "application/json"}
    name = "baton_event_loop_lag_seconds_bucket"

    async def flood(until: float) -> None:
        nonlocal refused
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as http:
            while time.monotonic() < until:
                answer = await http.post(_PATH, content=body, headers=headers)
                refused += answer.status_code == kind.status

    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30.0) as http:
        before = await _samples(http, name)
        until = time.monotonic() + seconds
        await asyncio.gather(*(flood(until) for _ in range(clients)))
        after = await _samples(http, name)
    bounds: dict[float, float] = {}
    for labels, value in after.items():
        bound = next(float(label) for label in labels if _is_number(label))
        bounds[bound] = bounds.get(bound, 0.0) + value - before.get(labels, 0.0)
    total = max(bounds.values())
    lag = min(bound for bound, count in bounds.items() if count >= 0.99 * total)
    return Flood(refused / seconds, lag)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


async def measure(
    turns: int, requests: int, seconds: float, clients: int
) -> tuple[list[Row], Flood]:
    """Run the cluster, and measure both. Raises BatonError if a process fails."""
    async with timed_cluster(settings()) as cluster, full_queue(cluster):
        rows = await measure_costs(cluster, turns, requests)
        return rows, await measure_flood(cluster, seconds, clients)


def main(
    turns: Annotated[int, typer.Option(min=1, help="Turns of each kind.")] = 7,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each turn.")] = 100,
    seconds: Annotated[float, typer.Option(min=1, help="Of the flood.")] = 20.0,
    clients: Annotated[int, typer.Option(min=1, help="Of the flood.")] = 4,
    output: Figures = None,
) -> None:
    """Measure what refusals cost a router. Exit code 1: a limit is exceeded."""
    rows, flood = asyncio.run(measure(turns, requests, seconds, clients))
    machine, console = this_machine(), Console()
    table = whole_table("refusal", "CPU, ms", "ratio", title="")
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        table.add_row(row.name, f"{row.cpu_ms:.2f}", ratio)
    print_whole(console, table)
    console.print(
        f"flood: {flood.refused_per_s:.0f} refused/s, lag p99 at most {flood.lag_p99_s * 1e3:g} ms"
    )
    console.print(f"{machine.line()}.", markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        fields = {
            "rows": [asdict(row) for row in rows],
            "flood": asdict(flood),
            "machine": asdict(machine),
        }
        write_json(output, json.dumps(fields, indent=1) + "\n")
    ratios = [row.ratio for row in rows if row.ratio is not None]
    if max(ratios) > MAX_RATIO or flood.lag_p99_s > MAX_LAG_S:
        raise typer.Exit(1)


app = bench_app(main)

if __name__ == "__main__":
    app()
