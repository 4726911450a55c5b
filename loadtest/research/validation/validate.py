"""Drives a live cluster, simulates the same load, and compares."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.config.cluster import Config
from loadtest.generator.load_driver import LoadDriver
from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.targets.openai_target import OpenAiTarget
from loadtest.generator.targets.target import AskOptions
from loadtest.research.validation.comparison import Comparison, compare
from loadtest.research.validation.offered_load import OfferedLoad
from loadtest.research.validation.predicted import predicted, with_call_time
from planning.common.slo import Slo
from planning.simulator.cluster_shape import ClusterShape


async def measured(
    load: OfferedLoad, url: str, model: str, *, run: int = 0
) -> tuple[list[RequestRecord], float]:
    """Send a load to a live cluster. Return a record of each request in order, and the p99 of the
    client's event-loop lag in seconds.

    Each ``run`` number gives new prompts, so that no prompt is cached.
    """
    target = OpenAiTarget(url, "completions", AskOptions(model))
    driver = LoadDriver(target)
    try:
        records = await driver.open_loop(iter(load.planned(run)))
    finally:
        await target.close()
    late = sorted(driver.loop_lag_s)
    records.sort(key=lambda record: record.number)
    return records, late[int(0.99 * (len(late) - 1))] if late else 0.0


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class LiveCluster:
    """A running cluster, and the settings with which the simulator predicts it."""

    url: str
    model: str
    """Name of the model in the cluster's API."""
    shape: ClusterShape
    config: Config
    """Configuration of the cluster; the goodput uses its SLOs."""
    knows_calls: bool = False
    """Whether the workers' profiles have a measured time per message. Profiles that `baton
    calibrate` writes have one."""

    @property
    def name(self) -> str:
        """Return the cluster's name, such as ``2P2D``."""
        return f"{self.shape.prefill}P{self.shape.decode}D"


async def validate(
    live: LiveCluster, probe: OfferedLoad, loads: Sequence[OfferedLoad], say: Say
) -> list[Comparison]:
    """Run the probe, then one load after another. Return a comparison for each load.

    ``probe`` is a load whose requests do not overlap. If the time per message is unknown, the probe
    is sent twice to measure it, with new prompts each time. The prediction uses no other
    measurement.
    """
    began = time.monotonic()
    # The first requests include one-time costs.
    await measured(probe, live.url, live.model, run=1)
    shape = live.shape
    if not live.knows_calls:
        seen, _ = await measured(probe, live.url, live.model, run=2)
        shape = with_call_time(live.shape, live.config, probe, seen)
    say(f"{live.name}: a message takes {shape.decode_profile.call_s * 1e3:.2f} ms")
    begun, runs = [], []
    for run, load in enumerate(loads, start=3):
        begun.append((time.monotonic() - began, load))
        runs.append(await measured(load, live.url, live.model, run=run))
        say(f"{live.name}: {load.rate:g} requests/s have ended")
    slo = Slo(live.config.slo_ttft_s, live.config.slo_tpot_s)
    said = predicted(begun, shape, live.config)
    return [
        compare(live.name, load, slo, ours, seen, late_s)
        for load, ours, (seen, late_s) in zip(loads, said, runs, strict=True)
    ]
