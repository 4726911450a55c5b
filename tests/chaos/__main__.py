"""``python -m tests.chaos --minutes N --seed S --json FILE``: see
docs/explanation/chaos-tests.md.

The exit code is 1 where a request was lost, an answer wrong, something leaked, a single fault cost
an error, a connection was reset and no router ended, or there were too few faults. What it was is
printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.chaos.faults.kinds import BY_NAME, KINDS, LAUNCHER_KINDS, Kind, away_for
from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.led_cluster import LedCluster
from tests.chaos.load.questions import questions
from tests.chaos.load.reference import engine_reference
from tests.chaos.report import Report
from tests.chaos.run import Run


async def run(
    minutes: float,
    seed: int,
    kinds: Sequence[Kind],
    *,
    max_rounds: int | None = None,
    logs: Path | None = None,
) -> Report:
    """One run with a cluster of its own, for a number of minutes or rounds of faults.

    ``logs``: a folder into which the cluster's go. Raises ``WrongBeforeFaults``.
    """
    asked = questions(seed)
    reference = await engine_reference(asked)
    cluster = LedCluster() if any(kind.needs_launchers for kind in kinds) else Cluster()
    async with cluster:
        try:
            report = await Run(cluster, seed, kinds, asked, reference).go(minutes, max_rounds)
        finally:
            if logs is not None:
                cluster.save_logs(logs)
    return replace(report, left=tuple(cluster.left))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long faults are injected")
    parser.add_argument("--seed", type=int, default=0, help="of the faults, prompts and clients")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--logs", type=Path, help="a folder for the cluster's logs")
    parser.add_argument(
        "--only", action="append", choices=sorted(BY_NAME), help="a kind of fault; may be repeated"
    )
    parser.add_argument(
        "--launchers", action="store_true", help="the kinds that need two launchers"
    )
    parser.add_argument("--away-s", type=float, help="how long launchers are away, in seconds")
    parser.add_argument("--rounds", type=int, help="end after so many rounds of faults")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    kinds: Sequence[Kind] = LAUNCHER_KINDS if asked.launchers else KINDS
    if asked.only:
        kinds = [BY_NAME[name] for name in asked.only]
    if asked.away_s is not None:
        kinds = [away_for(kind, asked.away_s) for kind in kinds]
    report = asyncio.run(
        run(asked.minutes, asked.seed, kinds, max_rounds=asked.rounds, logs=asked.logs)
    )
    asked.json.write_text(json.dumps(report.to_json(), indent=2) + "\n")
    for complaint in report.complaints:
        sys.stderr.write(f"{complaint}\n")
    return 1 if report.complaints else 0


if __name__ == "__main__":
    sys.exit(main())
