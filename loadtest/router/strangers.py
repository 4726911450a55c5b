"""Measures the effect of clients without a key on a router's memory, and on other clients' latency.

    python -m loadtest.router.strangers --model FOLDER

The router, its store and the echo worker are those of ``loadtest.router.router_bench``; the router
requires keys. A client with a key sends requests at a constant rate, over persistent connections.
It is measured in turns: twice without strangers (the ratio of the two is the noise), then with them
(``loadtest.router.stranger_load``). *p99* is of the time to the first event. *Memory* is the peak
growth of the router's resident memory since the moment before the strangers came.

The strangers share a core with the client, the worker and the store, at the lowest priority.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from baton.config.access import KeyConfig
from baton.config.cluster import Config
from baton.errors import ConfigError
from loadtest.common.bench_app import Figures, ModelFolder, bench_app, say
from loadtest.common.child_processes import bench_store, cores, pinned
from loadtest.common.json_worker import Fields, Helper, helper
from loadtest.common.peer_servers import SERVED_NAME
from loadtest.router.router_process import (
    RouterChild,
    forget_peak,
    peak_memory,
    router_child,
)
from planning.common.report import this_machine, write_json

KEY = "sk-strangers"
MAX_RATIO = 1.25
"""Limit of the p99 latency with strangers (clients without an API key), divided by the p99 latency
without them."""
MAX_GROWTH_MIB = 64.0
CALL_BYTES = 60 << 20
_CLUSTER_ID = "strangers"
_READY_S = 60.0
_RUN_S = 120.0
ATTACKS: Mapping[str, Fields] = {
    "1,000 calls of 60 MiB, 2,000 watches": {
        "do": "call",
        "calls": 1000,
        "bytes": CALL_BYTES,
        "watches": 2000,
    },
    "5,000 connections": {"do": "connect", "count": 5000},
}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a measurement with hostile load: that of clients without an API key."""

    model: Path
    rate: float = 100.0
    """Requests per second that the client with an API key sends."""
    requests: int = 1000
    """Number of requests that the client with an API key sends in each turn."""
    turns: int = 3
    answer_tokens: int = 8


@dataclass(frozen=True, slots=True)
class Row:
    """Effect of one kind of attack on a router. Times are in milliseconds, and are medians over all
    turns."""

    attack: str
    p99_without: float
    p99_again: float
    p99_beside: float
    growth_mib: float
    strangers: Fields
    """Numbers of open connections and calls of the clients without an API key, at the end of the
    attack."""

    @property
    def ratio(self) -> float:
        """Return the p99 latency with strangers, divided by the p99 latency without them."""
        return self.p99_beside / max(self.p99_without, self.p99_again)

    @property
    def meets_aims(self) -> bool:
        """Whether latency and memory stay within their limits during the attack."""
        return self.ratio <= MAX_RATIO and self.growth_mib <= MAX_GROWTH_MIB


async def measure(settings: Settings) -> list[Row]:
    """Measure the effect of each kind of attack. Raises ConfigError on a machine with one core, and
    BatonError if a process fails.
    """
    usable = cores()
    if len(usable) < 2:
        raise ConfigError("two cores are needed: one for the router, one for the load")
    hashed = hashlib.sha256(KEY.encode()).hexdigest()
    config = Config(
        require_key=True,
        keys=(KeyConfig(name="client", sha256=hashed, tenant="default"),),
    )
    # The path is short, since a socket's path is limited.
    with (
        tempfile.TemporaryDirectory(prefix="baton-") as name,
        pinned(usable[1]),
        bench_store(Path(name)) as url,
    ):
        folder = Path(name)
        echo = {
            "redis_url": url,
            "cluster_id": _CLUSTER_ID,
            "context_length": 8192,
            "first_token_id": 1000,
        }
        log = folder / "router.log"
        async with (
            helper("loadtest.router.echo_worker", echo, folder / "echo.log", ready_s=_READY_S),
            router_child(config, url, _CLUSTER_ID, settings.model, log, core=usable[0]) as router,
        ):
            start = {
                "prompt_words": 50,
                "seed": 1,
                "http": router.http,
                "model": SERVED_NAME,
                "key": KEY,
            }
            module = "loadtest.router.stream_client"
            async with helper(module, start, folder / "client.log", ready_s=_READY_S) as client:
                await _p99(settings, client)
                return [
                    await _row(settings, name, attack, client, router, folder)
                    for name, attack in ATTACKS.items()
                ]


async def _row(
    settings: Settings,
    name: str,
    attack: Fields,
    client: Helper,
    router: RouterChild,
    folder: Path,
) -> Row:
    without, again, attacked, growth = [], [], [], []
    counts: Fields = {}
    start = {"http": router.http, "grpc": router.grpc}
    for turn in range(settings.turns):
        without.append(await _p99(settings, client))
        again.append(await _p99(settings, client))
        module, log = "loadtest.router.stranger_load", folder / "strangers.log"
        async with helper(module, start, log, ready_s=_READY_S) as strangers:
            before = forget_peak(router.process)
            begun = asyncio.create_task(strangers.ask(attack, _RUN_S))
            attacked.append(await _p99(settings, client))
            await begun
            growth.append((peak_memory(router.process) - before) / (1 << 20))
            counts = await strangers.ask({"do": "leave"}, _RUN_S)
        say(f"{name}, turn {turn + 1}: p99 {attacked[-1]:.2f} ms, without {without[-1]:.2f} ms")
    medians = [float(np.median(one)) for one in (without, again, attacked)]
    return Row(name, medians[0], medians[1], medians[2], max(growth), counts)


async def _p99(settings: Settings, client: Helper) -> float:
    question = {
        "do": "at_rate",
        "rate": settings.rate,
        "requests": settings.requests,
        "tokens": settings.answer_tokens,
    }
    answer = await client.ask(question, _RUN_S)
    return float(np.percentile(answer["first_ms"], 99))


def draw(rows: list[Row]) -> Table:
    """Return a table with a row for each attack."""
    columns = (
        "strangers",
        "p99 without, ms",
        "again",
        "with them",
        "ratio",
        "memory, MiB",
        "aims",
    )
    table = Table(*columns)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            row.attack,
            f"{row.p99_without:.2f}",
            f"{row.p99_again:.2f}",
            f"{row.p99_beside:.2f}",
            f"{row.ratio:.2f}",
            f"{row.growth_mib:.0f}",
            "met" if row.meets_aims else "missed",
        )
    return table


def main(
    model: ModelFolder,
    rate: Annotated[float, typer.Option(min=1, help="Requests per second.")] = 100.0,
    requests: Annotated[int, typer.Option(min=10, help="Requests of each turn.")] = 1000,
    turns: Annotated[int, typer.Option(min=1, help="Turns of each attack.")] = 3,
    output: Figures = None,
) -> None:
    """Measure the effect of clients without a key on a router. Exit code 1: a limit is exceeded."""
    settings = Settings(model, rate=rate, requests=requests, turns=turns)
    rows = asyncio.run(measure(settings))
    machine = this_machine()
    console = Console()
    console.print(draw(rows))
    for row in rows:
        console.print(f"{row.attack}: {json.dumps(row.strangers)}", markup=False, highlight=False)
    console.print(f"{machine.line()}.", markup=False, highlight=False, soft_wrap=True)
    if output is not None:
        fields = {"rows": [asdict(row) for row in rows], "machine": asdict(machine)}
        write_json(output, json.dumps(fields, indent=1) + "\n")
    if not all(row.meets_aims for row in rows):
        raise typer.Exit(1)


app = bench_app(main)

if __name__ == "__main__":
    app()
