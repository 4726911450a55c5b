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
    """A record of each request, in their order, and how late the client's event loop was, at p99

    in seconds. Another ``run`` has prompts that no cache knows from one before.
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
    """One that serves, and what the simulator is told of it."""

    url: str
    model: str
    """Its name in the API."""
    shape: ClusterShape
    config: Config
    """That it was started with; its SLOs are those of the goodput."""
    knows_calls: bool = False
    """Whether its profiles have the time of a message, as those of `baton calibrate` have."""

    @property
    def name(self) -> str:
        """``2P2D``"""
        return f"{self.shape.prefill}P{self.shape.decode}D"


async def validate(
    live: LiveCluster, probe: OfferedLoad, loads: Sequence[OfferedLoad], say: Say
) -> list[Comparison]:
    """The probe, then one load after another; a comparison of each load.

    ``probe``: requests that do not meet. Where nobody knows yet how long a message takes here they
    are sent twice, and tell it; that is all that is taken from what is measured. Prompts are new
    each time.
    """
    began = time.monotonic()
    # The first requests pay for first uses.
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
