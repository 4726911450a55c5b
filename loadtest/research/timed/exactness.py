"""Measures how exact the steps of timed workers are, and the resources of such a worker.

    python -m loadtest.research.timed.exactness --prefill 4 --decode 4

Every decode worker runs the requested sequences at 20 tokens per second each; the client and all
processes share the machine. The results for each role are: the measured time of a step relative to
the cost model's, the delay of the next step's request, and a worker's share of a core and its
memory.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import string
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import psutil
from rich.console import Console

from loadtest.common.peer_servers import SERVED_NAME
from loadtest.research.timed.cluster import Steps, TimedCluster, TimedSettings, timed_cluster
from loadtest.router.stream_client import HttpTarget
from planning.common.report import print_whole, this_machine, whole_table
from worker.costs.step_costs import StepCosts

_COSTS = StepCosts(prefill=(10.0, 0.2, 0.0), step=(50.0, 0.0, 0.0))
"""Step costs with which each sequence gets 20 tokens per second, independent of the number of
sequences."""
_PROMPT_TOKENS = 64
_IDLE_S = 5.0
_FIRST_STEPS = 20
"""Number of steps at a worker's start that do not count, because sequences are still arriving
then."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Resources that one worker's process uses."""

    idle_core: float
    """Share of a CPU core that the worker's process uses while it is idle."""
    busy_core: float
    private_mib: float
    """Memory that the worker's process shares with no other process (USS), in MiB."""


def main() -> None:
    """Measure timed workers, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prefill", type=int, default=4, help="prefill workers")
    parser.add_argument("--decode", type=int, default=4, help="decode workers")
    parser.add_argument("--sequences", type=int, default=16, help="of each decode worker")
    parser.add_argument("--seconds", type=float, default=20.0, help="that answers take")
    given = parser.parse_args()
    settings = TimedSettings(given.prefill, given.decode, _COSTS, config={"local_prefill": "never"})
    steps, footprints = asyncio.run(measure(settings, given.sequences, given.seconds))
    _print(steps, footprints)


async def measure(
    settings: TimedSettings, sequences: int, seconds: float
) -> tuple[dict[str, Steps], dict[str, Footprint]]:
    """Run ``sequences`` sequences on each decode worker for about ``seconds``. Return steps and
    footprints by slot."""
    async with timed_cluster(settings) as cluster:
        idle = _Use(cluster)
        await asyncio.sleep(_IDLE_S)
        idle_cores = idle.shares()
        target = HttpTarget(cluster.router.http, SERVED_NAME)
        dice = random.Random(0)  # noqa: S311 - prompts, no secret
        tokens = max(2, int(seconds / (settings.costs.step[0] / 1e3)))
        busy = _Use(cluster)
        answers = []
        for _ in range(sequences * settings.decode):
            prompt = "".join(dice.choices(string.ascii_lowercase, k=_PROMPT_TOKENS))
            answers.append(await target.begin(prompt, tokens))
            await asyncio.sleep(0.02)
        for answer in answers:
            async with asyncio.timeout(4 * seconds + 60.0):
                await answer.ended.wait()
        busy_cores = busy.shares()
        await target.close()
        found = {slot: await cluster.steps(slot) for slot in cluster.workers}
        footprints = {
            slot: Footprint(idle_cores[slot], busy_cores[slot], _private_mib(pid))
            for slot, pid in _pids(cluster).items()
        }
        return found, footprints


class _Use:
    """Measures the share of a CPU core that each worker has used since this object was made."""

    def __init__(self, cluster: TimedCluster) -> None:
        self._pids = _pids(cluster)
        self._began, self._before = time.monotonic(), self._seconds()

    def _seconds(self) -> dict[str, float]:
        times = {slot: psutil.Process(pid).cpu_times() for slot, pid in self._pids.items()}
        return {slot: float(one.user + one.system) for slot, one in times.items()}

    def shares(self) -> dict[str, float]:
        """Return the share of a core that each worker has used; 1 is a whole core."""
        passed = time.monotonic() - self._began
        return {slot: (s - self._before[slot]) / passed for slot, s in self._seconds().items()}


def _pids(cluster: TimedCluster) -> dict[str, int]:
    return {slot: int(worker.hello["pid"]) for slot, worker in cluster.workers.items()}


def _private_mib(pid: int) -> float:
    return float(psutil.Process(pid).memory_full_info().uss) / (1 << 20)


def ratios(steps: Sequence[Steps]) -> tuple[float, float, float, float]:
    """Return median and p99 of the ratios of measured to requested step times, and of the gaps
    between steps in milliseconds.

    Only short gaps count, after which the next step followed immediately. In longer gaps the worker
    was idle.
    """
    kept = [
        slice(_FIRST_STEPS, None) if len(one.asked_s) > 2 * _FIRST_STEPS else slice(None)
        for one in steps
    ]
    took = np.concatenate([one.took_s[part] for one, part in zip(steps, kept, strict=True)])
    asked = np.concatenate([one.asked_s[part] for one, part in zip(steps, kept, strict=True)])
    gaps = 1e3 * np.concatenate([one.gap_s[part] for one, part in zip(steps, kept, strict=True)])
    gaps = gaps[gaps < 1e3 * asked]
    quantiles = [*np.percentile(took / asked, (50, 99)), *np.percentile(gaps, (50, 99))]
    return float(quantiles[0]), float(quantiles[1]), float(quantiles[2]), float(quantiles[3])


def _print(steps: Mapping[str, Steps], footprints: Mapping[str, Footprint]) -> None:
    console = Console()
    table = whole_table(
        *("role", "steps", "took/asked p50", "p99", "gap p50, ms", "p99"),
        *("idle, cores", "busy, cores", "MiB"),
        title="Timed workers",
    )
    for role in ("prefill", "decode"):
        own = [slot for slot in steps if slot.startswith(role) and len(steps[slot].asked_s)]
        if not own:
            continue
        p50, p99, gap_p50, gap_p99 = ratios([steps[slot] for slot in own])
        costs = [footprints[slot] for slot in own]
        table.add_row(
            role,
            str(sum(len(steps[slot].asked_s) for slot in own)),
            *(f"{ratio:.3f}" for ratio in (p50, p99)),
            *(f"{gap:.2f}" for gap in (gap_p50, gap_p99)),
            f"{np.mean([cost.idle_core for cost in costs]):.3f}",
            f"{np.mean([cost.busy_core for cost in costs]):.3f}",
            f"{np.mean([cost.private_mib for cost in costs]):.0f}",
        )
    print_whole(console, table)
    console.print(f"{this_machine().line()}.", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
