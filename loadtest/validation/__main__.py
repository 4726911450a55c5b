"""Predicted against measured: the simulator, and real workers whose engine is timed.

    python -m loadtest.validation --shape 2x2 --rates 3,4.4,6

The same requests go through both. A light probe before, in which no request meets another, tells
how long a message takes on this machine; nothing else is taken from what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loadtest.generator.lengths import Lengths
from loadtest.generator.slo import Slo
from loadtest.machine import this_machine
from loadtest.peer_servers import SERVED_NAME
from loadtest.simulator.cluster_shape import ClusterShape
from loadtest.simulator.fitted_costs import FittedCosts
from loadtest.simulator.worker_profile import WorkerProfile
from loadtest.timed.cluster import TimedCluster, TimedSettings, timed_cluster
from loadtest.timed.model_folder import CONTEXT_TOKENS, KV_TOKEN_BYTES
from loadtest.validation.comparison import Comparison, Figure, compare
from loadtest.validation.measured import measured
from loadtest.validation.offered_load import OfferedLoad
from loadtest.validation.predicted import predicted, with_call_time
from loadtest.whole_table import print_whole, whole_table
from worker.step_costs import StepCosts

COSTS = StepCosts(prefill=(15.0, 0.4, 0.00002), step=(30.0, 1.5, 0.002))
"""Of the timed workers: a small GPU's pattern, slowed so that two cores carry eight of them."""
SLO_TTFT_S, SLO_TPOT_S = 1.0, 0.075
INPUTS, OUTPUTS = Lengths.parse("lognormal:450,0.7,3000"), Lengths.parse("lognormal:60,0.6,300")
PROBE = OfferedLoad(1.0, 8.0, Lengths.parse("400"), Lengths.parse("12"), "constant")
_WIRE_BYTES_PER_S = 1e9
"""Of shared memory here; the timed engine's KV is too small for it to count."""


def main() -> None:
    """Measure, simulate, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="1x1", help="prefill and decode workers, as in 2x2")
    parser.add_argument("--rates", default="1.5,2.2,3", help="requests per second, one run each")
    parser.add_argument("--seconds", type=float, default=45.0, help="in which requests come")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    given = parser.parse_args()
    prefill, decode = (int(part) for part in given.shape.split("x"))
    loads = [
        OfferedLoad(float(rate), given.seconds, INPUTS, OUTPUTS, seed=given.seed)
        for rate in given.rates.split(",")
    ]
    slos = {"slo_ttft_s": SLO_TTFT_S, "slo_tpot_s": SLO_TPOT_S}
    settings = TimedSettings(prefill, decode, COSTS, config=slos)
    console = Console()
    found = asyncio.run(validate(settings, loads, console))
    print_whole(console, table_of(found))
    console.print(f"{this_machine().line()}.", markup=False, highlight=False, soft_wrap=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


async def validate(
    settings: TimedSettings, loads: Sequence[OfferedLoad], console: Console
) -> list[Comparison]:
    """One cluster, and one load after another. Raises BatonError where it does not come up."""
    name = f"{settings.prefill}P{settings.decode}D"
    slo = Slo(SLO_TTFT_S, SLO_TPOT_S)
    async with timed_cluster(settings) as cluster:
        began = time.monotonic()
        url = f"http://{cluster.router.http}"
        # The first requests pay for first uses.
        await measured(PROBE, url, SERVED_NAME, run=1)
        seen, _ = await measured(PROBE, url, SERVED_NAME, run=2)
        shape = with_call_time(shape_of(cluster), cluster.config, PROBE, seen)
        call_ms = shape.prefill_profile.call_s * 1e3
        console.print(f"{name}: a message takes {call_ms:.2f} ms", highlight=False)
        begun, runs = [], []
        for run, load in enumerate(loads, start=3):
            begun.append((time.monotonic() - began, load))
            runs.append(await measured(load, url, SERVED_NAME, run=run))
    said = predicted(begun, shape, cluster.config)
    return [
        compare(name, load, slo, ours, seen, late_s)
        for load, ours, (seen, late_s) in zip(loads, said, runs, strict=True)
    ]


def shape_of(cluster: TimedCluster) -> ClusterShape:
    """The cluster as the simulator takes it."""
    settings = cluster.settings
    profile = WorkerProfile(
        name="timed",
        costs=FittedCosts(settings.costs),
        kv_tokens=(settings.kv_pool_mib << 20) // KV_TOKEN_BYTES,
        kv_token_bytes=KV_TOKEN_BYTES,
        layers=1,
        context_length=CONTEXT_TOKENS,
        wire_bytes_per_s=_WIRE_BYTES_PER_S,
        max_sequences=settings.max_sequences,
        chunk_tokens=settings.chunk_tokens,
        is_cpu=True,
    )
    return ClusterShape(settings.prefill, settings.decode, profile, profile)


def table_of(found: Sequence[Comparison]) -> Table:
    """A line for each load: predicted / measured, and the error."""
    names = [figure.name for figure in found[0].figures]
    table = whole_table(
        *("shape", "requests/s", "counted", *names, "met the SLOs", "refused", "client late, ms"),
        title="Predicted / measured; times in ms",
    )
    for one in found:
        said, seen = one.attainment
        table.add_row(
            *(one.shape, f"{one.rate:g}", str(one.requests)),
            *(_cell(figure) for figure in one.figures),
            f"{said:.0%} / {seen:.0%}",
            "{} / {}".format(*one.refused),
            f"{one.late_ms:.0f}",
        )
    return table


def _cell(figure: Figure) -> str:
    digits = 2 if figure.name == "goodput/s" else 0
    values = f"{figure.predicted:.{digits}f} / {figure.measured:.{digits}f}"
    return f"{values} {figure.error:+.0%}" + ("" if figure.is_met else " !")


if __name__ == "__main__":
    main()
