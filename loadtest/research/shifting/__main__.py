"""Measures goodput on six workers under traffic that shifts from long prompts to long answers and
back.

It compares every fixed ratio of roles with the autoscaler.

    python -m loadtest.research.shifting simulated
    python -m loadtest.research.shifting live

``live`` starts real clusters of timed workers, one after another, and takes about twelve minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from loadtest.research.shifting import scenario
from loadtest.research.shifting.live import RolesSeen, autoscaled, fixed_ratios
from loadtest.research.shifting.outcome import AUTOSCALED, Outcome, gain, table_of
from loadtest.research.shifting.scenario import ShiftingTraffic
from loadtest.research.shifting.simulated import compare
from planning.common.report import print_whole, this_machine
from planning.simulator.cluster.simulated_autoscaler import RoleChange


def main() -> None:
    """Run the simulated or the live comparison, and print the results."""
    # The clusters that it has started end with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    given = _parser().parse_args()
    traffic = ShiftingTraffic(given.rate, given.phase_seconds, given.seed)
    console = Console()
    if given.what == "simulated":
        found, changes = compare(traffic, given.local_prefill)
        lines = [_change(one) for one in changes]
    else:
        found, seen = asyncio.run(_live(given, traffic, console))
        lines = [_seen(one) for one in seen]
    print_whole(console, table_of(found, traffic, given.what))
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if any(one.name == AUTOSCALED for one in found) and len(found) > 1:
        console.print(
            f"The autoscaler's goodput is {gain(found):.2f} times the best fixed ratio's."
        )
    console.print(f"{this_machine().line()}.", markup=False, highlight=False, soft_wrap=True)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")


async def _live(
    given: argparse.Namespace, traffic: ShiftingTraffic, console: Console
) -> tuple[list[Outcome], Sequence[RolesSeen]]:
    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    found: list[Outcome] = []
    seen: list[RolesSeen] = []
    with tempfile.TemporaryDirectory(prefix="baton-") as name:
        ratios = [(prefill, scenario.WORKERS - prefill) for prefill in given.prefill]
        if ratios:
            found += await fixed_ratios(traffic, ratios, given.local_prefill, Path(name), say)
        if not given.fixed_only:
            last, seen = await autoscaled(traffic, given.local_prefill, Path(name), say)
            found.append(last)
    return found, seen


def _change(one: RoleChange) -> str:
    return f"{one.begun_s:.1f} s: {one.worker} → {one.role} in {one.took_s:.1f} s ({one.why})"


def _seen(one: RolesSeen) -> str:
    return f"{one.at_s:.0f} s: {one.prefill} prefill, {one.decode} decode"


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="what", required=True)
    for name in ("simulated", "live"):
        kind = kinds.add_parser(name)
        kind.add_argument("--rate", type=float, default=scenario.RATE, help="requests per second")
        kind.add_argument(
            "--phase-seconds", type=float, default=scenario.PHASE_S, help="of the long answers"
        )
        kind.add_argument("--local-prefill", default="never", choices=("auto", "never"))
        kind.add_argument("--seed", type=int, default=0)
        kind.add_argument("--json", type=Path, help="a file for the figures")
        if name == "live":
            every = ",".join(str(prefill) for prefill, _ in scenario.RATIOS)
            kind.add_argument(
                "--prefill",
                type=_counts,
                default=_counts(every),
                help=f"prefill workers of each fixed ratio; {every}",
            )
            kind.add_argument(
                "--fixed-only", action="store_true", help="without the autoscaler's run"
            )
    return parser


if __name__ == "__main__":
    main()
