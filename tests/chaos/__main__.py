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
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from baton.config.cluster import Config
from tests.chaos.faults.faults import FAULTS
from tests.chaos.faults.kinds import BY_NAME, KINDS, LAUNCHER_KINDS, MODEL_KINDS, Kind, away_for
from tests.chaos.faults.rollout_faults import RolledOut
from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.led_cluster import LedCluster
from tests.chaos.harness.plain_cluster import PlainCluster, Served, all_served
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
    with _models(kinds) as served:
        configs = [one.config for one in served] or [Config(deterministic=True)]
        reference = await engine_reference(asked, configs)
        cluster = _cluster(kinds, served)
        async with cluster:
            try:
                report = await Run(cluster, seed, kinds, asked, reference).go(minutes, max_rounds)
            finally:
                if logs is not None:
                    cluster.save_logs(logs)
    return replace(report, left=tuple(cluster.left))


def _models(kinds: Sequence[Kind]) -> AbstractContextManager[Sequence[Served]]:
    """What plain workers may serve; nothing, where the kinds need none."""
    faults = [FAULTS[kind.name] for kind in kinds]
    names = {one.to for one in faults if issubclass(one, RolledOut)}
    return all_served(names) if names else nullcontext(())


def _cluster(kinds: Sequence[Kind], served: Sequence[Served]) -> Cluster:
    if served:
        return PlainCluster(served)
    return LedCluster() if any(kind.needs_launchers for kind in kinds) else Cluster()


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
    parser.add_argument(
        "--models", action="store_true", help="the kinds that change what workers serve"
    )
    parser.add_argument("--away-s", type=float, help="how long launchers are away, in seconds")
    parser.add_argument("--rounds", type=int, help="end after so many rounds of faults")
    asked = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    kinds: Sequence[Kind] = KINDS
    if asked.launchers:
        kinds = LAUNCHER_KINDS
    elif asked.models:
        kinds = MODEL_KINDS
    if asked.only:
        kinds = [BY_NAME[name] for name in asked.only]
    needs_launchers = any(kind.needs_launchers for kind in kinds)
    if needs_launchers and any(kind.needs_plain_workers for kind in kinds):
        parser.error("kinds with launchers and kinds of plain workers need different clusters")
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
