"""Compares predictions and measurements of the same requests, in the simulator and a live cluster.

    python -m loadtest.research.validation timed --shape 2x2 --rates 3,4.4,6
    python -m loadtest.research.validation live --url URL --profile FILE --rates 0.5,1

``timed`` starts real workers whose engine is timed. ``live`` drives a cluster of this machine that
`baton serve` has started, with a profile by `baton calibrate`. Exit code 1: the error of a figure
exceeds its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from baton.config.cluster import load_config
from loadtest.generator.workload.lengths import Lengths
from loadtest.research.timed.cluster import timed_cluster
from loadtest.research.validation import timed_case as timed
from loadtest.research.validation.comparison import Comparison, Figure
from loadtest.research.validation.offered_load import OfferedLoad
from loadtest.research.validation.validate import LiveCluster, Say, validate
from planning.common.report import print_whole, this_machine, whole_table
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.worker_profile import read_profile


def main() -> None:
    """Measure and simulate the loads, and print the comparison."""
    given = _parser().parse_args()
    console = Console()
    loads = [
        OfferedLoad(float(rate), given.seconds, given.inputs, given.outputs, seed=given.seed)
        for rate in given.rates.split(",")
    ]
    found = asyncio.run(_found(given, loads, lambda text: console.print(text, highlight=False)))
    print_whole(console, table_of(found))
    console.print(f"{this_machine().line()}.", markup=False, highlight=False, soft_wrap=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if not all(figure.is_met for one in found for figure in one.figures):
        sys.exit(1)


async def _found(
    given: argparse.Namespace, loads: Sequence[OfferedLoad], say: Say
) -> list[Comparison]:
    prefill, decode = (int(part) for part in given.shape.split("x"))
    if given.what == "timed":
        async with timed_cluster(timed.settings_of(prefill, decode)) as cluster:
            return await validate(timed.live_cluster(cluster), timed.PROBE, loads, say)
    profile = read_profile(str(given.profile))
    shape = ClusterShape(prefill, decode, profile, profile, hosts=1)
    live = LiveCluster(given.url, given.model, shape, load_config(given.config), knows_calls=True)
    probe = replace(timed.PROBE, rate=0.5, seconds=12.0)
    return await validate(live, probe, loads, say)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="what", required=True)
    for name, rates, inputs, outputs in (
        ("timed", "1.5,2.2,3", timed.INPUTS, timed.OUTPUTS),
        ("live", "0.5,1,1.5", Lengths.parse("lognormal:200,0.6,1200"), timed.OUTPUTS),
    ):
        kind = kinds.add_parser(name)
        kind.add_argument("--shape", default="1x1", help="prefill and decode workers, as in 2x2")
        kind.add_argument("--rates", default=rates, help="requests per second, one load each")
        kind.add_argument("--seconds", type=float, default=40.0, help="duration of arrivals")
        kind.add_argument("--inputs", type=Lengths.parse, default=inputs, help="prompts' lengths")
        kind.add_argument("--outputs", type=Lengths.parse, default=outputs, help="answers' lengths")
        kind.add_argument("--seed", type=int, default=0)
        kind.add_argument("--json", type=Path, help="a file for the figures")
        if name == "live":
            kind.add_argument("--url", default="http://127.0.0.1:8000")
            kind.add_argument("--model", required=True, help="name of the model in the API")
            kind.add_argument(
                "--profile", type=Path, required=True, help=("profile of `baton calibrate`")
            )
            kind.add_argument("--config", type=Path, help="configuration file of the cluster")
    return parser


def table_of(found: Sequence[Comparison]) -> Table:
    """Return a table with a row for each load: predicted / measured figures, and the error. ``!``
    marks an error above its limit."""
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
