"""Measures the maximum load of one `baton bench serve` process, and its accuracy, against an echo.

python -m loadtest.research.timings.client_limits --rates 500,1000,2000 --seconds 10

The server answers each request's first token at once and the others one per step, so any delay
comes from the client or from the echo server. Both run on the same machine.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from loadtest.common.json_worker import helper
from loadtest.generator.load_run import LoadRun, run_load
from loadtest.generator.load_settings import (
    LoadSettings,
    PaceSettings,
    ServerSettings,
    TrafficSettings,
    make_traffic,
)
from loadtest.generator.workload.lengths import Lengths
from planning.common.report import print_whole, this_machine, whole_table

_READY_S = 20.0


async def measure(
    rate: float, seconds: float, prompt: int, answer: int, step_s: float, console: Console
) -> LoadRun:
    """Measure the client at one rate: prompts of ``prompt`` words, answers of ``answer`` tokens,
    one token per step of ``step_s``.
    """
    with tempfile.TemporaryDirectory(prefix="baton-") as folder:
        log = Path(folder) / "echo.log"
        async with helper("loadtest.router.echo_http", {}, log, ready_s=_READY_S) as echo:
            await echo.ask({"step_s": step_s}, _READY_S)
            settings = LoadSettings(
                ServerSettings(
                    f"http://127.0.0.1:{echo.hello['port']}", endpoint="chat", model="m"
                ),
                TrafficSettings(Lengths("fixed", prompt), Lengths("fixed", answer)),
                PaceSettings(rate, seconds=seconds),
            )
            return await run_load(settings, make_traffic(settings, None), console, console.print)


def main(
    rates: Annotated[str, typer.Option(help="Requests a second.")] = "500,1000,2000",
    seconds: Annotated[float, typer.Option(help="Of each.")] = 10.0,
    prompt: Annotated[int, typer.Option(help="Words.")] = 100,
    answer: Annotated[int, typer.Option(help="Tokens.")] = 16,
    step_ms: Annotated[float, typer.Option(help="Between them.")] = 20.0,
) -> None:
    """Measure the client at each rate, and print a table."""
    console = Console()
    table = whole_table(
        *("offered/s", "ok/s", "bad", "send lag p99, ms", "max", "loop lag p99, ms"),
        *("TTFT p99, ms", "TPOT p50, ms", "client's core", "reliable"),
        title="",
    )
    for rate in map(float, rates.split(",")):
        run = uvloop.run(measure(rate, seconds, prompt, answer, step_ms / 1e3, console))
        found = run.summary
        table.add_row(
            f"{found.offered_per_s:.0f}",
            f"{found.completed_per_s:.0f}",
            str(found.all.requests - found.all.ok),
            f"{found.lag.p99_ms:.2f}",
            f"{found.lag.max_ms:.2f}",
            f"{run.loop_lag.p99_ms:.2f}",
            f"{found.all.ttft.p99_ms:.2f}",
            f"{found.all.tpot.p50_ms:.2f}",
            f"{run.client_core:.0%}",
            "no" if run.warnings else "yes",
        )
    print_whole(console, table)
    console.print(this_machine().line(), markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    typer.run(main)
