"""Measures the decision time of the router's policy, with many workers.

    python -m loadtest.research.timings.decision_time --workers 1000

Half of the workers prefill, half decode, all in use. 16 workers hold a part of each prompt; with
--shared-block all others hold its first block too. The answers of the prefix index are simulated.
"""

from __future__ import annotations

import random
import time
from collections import deque
from typing import Annotated, cast

import numpy as np
import typer
from rich.console import Console

from baton.config.choices import LocalPrefill, PolicyName
from baton.host.process_tuning import keep_buffers
from baton.request import Geometry, LoadSnapshot
from baton.store.held_blocks import HeldBlocks
from baton.store.registry import WorkerRecord
from planning.common.report import print_whole, this_machine, whole_table
from router.routing.policies import make_policy
from router.routing.policy import ClassRoute, Policy, RouteRequest, RouteSettings
from router.routing.routing_state import Promise, RoutingState

_HOLDERS = 16
_DEEPEST = 128
_EVERY_S = 0.002
_LASTS_S = 0.2
_BLOCK = 16


def measure(
    workers: int, decisions: int, policy: PolicyName, route: ClassRoute, *, shared_block: bool
) -> list[float]:
    """Make routing decisions, and return the time of each in microseconds. A decision's share of
    the expected blocks' cost is included.
    """
    routing = joined(workers, make_policy(policy, RouteSettings(_BLOCK, default=route), 1))
    dice = random.Random(1)  # noqa: S311 - lengths and holders, no secret
    names = dict(enumerate(routing.table.incarnations()))
    placed: deque[tuple[float, Promise]] = deque()
    took = []
    for count in range(decisions):
        now = count * _EVERY_S
        while placed and placed[0][0] <= now:
            placed.popleft()[1].ended(now)
        holders = dice.sample(range(workers), min(_HOLDERS, workers))
        depths = [dice.randint(1, _DEEPEST) for _ in holders]
        if shared_block:
            holders, depths = [*range(workers), *holders], [*([1] * workers), *depths]
        held = HeldBlocks(names, np.array(holders), np.array(depths), {})
        request = RouteRequest(dice.randint(50, 4000))
        began = time.perf_counter()
        decision = routing.decide(request, (), held, now)
        took.append((time.perf_counter() - began) * 1e6)
        placed.append((now + _LASTS_S, routing.promise(decision, request, (), now)))
    return took


def joined(workers: int, policy: Policy) -> RoutingState:
    """Return a routing state with ``workers`` workers that are up and in use, half of each role."""
    routing = RoutingState(policy, _BLOCK)
    for number in range(workers):
        _join(routing, number)
    return routing


def _join(routing: RoutingState, number: int) -> None:
    role = "decode" if number % 2 else "prefill"
    record = WorkerRecord(
        incarnation=f"{role}-{number}",
        slot=f"{role}-{number}",
        role=role,
        address="",
        metrics_address="",
        model="",
        fingerprint="",
        geometry=Geometry(_BLOCK, 30, 3, 64, "bfloat16"),
        context_length=8192,
        total_blocks=4000,
        max_sequences=64,
    )
    routing.table.add(record)
    load = LoadSnapshot(running=number % 7, free_blocks=3000, context_tokens=100 * (number % 7))
    routing.table.set_load(record.incarnation, load, 0.0)
    routing.table.set_up(record.incarnation, True)


def main(
    workers: Annotated[int, typer.Option(min=2, help="Number of workers of both roles.")] = 1000,
    decisions: Annotated[int, typer.Option(min=1, help="Decisions measured for each line.")] = 3000,
    policy: Annotated[str, typer.Option(help="Policy, as for `baton serve`.")] = "predictive",
) -> None:
    """Measure decision times, and print percentiles."""
    # As the router's process does.
    keep_buffers()
    table = whole_table("local prefill, holders", "p50 us", "p90 us", "p99 us", title="")
    modes: tuple[LocalPrefill, ...] = ("never", "auto")
    for local in modes:
        for shared in (False, True):
            route = ClassRoute(local)
            took = measure(workers, decisions, cast(PolicyName, policy), route, shared_block=shared)
            holders = "all" if shared else str(_HOLDERS)
            figures = np.percentile(took, (50, 90, 99))
            table.add_row(f"{local}, {holders}", *(f"{value:.0f}" for value in figures))
    Console().print(this_machine().line())
    print_whole(Console(), table)


if __name__ == "__main__":
    typer.run(main)
