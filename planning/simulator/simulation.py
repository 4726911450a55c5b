"""Simulates a cluster that serves a trace, in virtual time.

This is a discrete-event simulation of the objects that a live cluster runs: the router's admission,
planner and policy, and the workers' schedulers, block pools, step planners and reservation rules.
Only the times of engine and network are modeled, and Redis is a directory in memory.
docs/explanation/simulator.md has the assumptions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from baton.config.cluster import Config
from baton.errors import ConfigError
from planning.common.traces import TracedRequest
from planning.simulator.cluster.event_queue import ARRIVAL, EventQueue
from planning.simulator.cluster.host import Host
from planning.simulator.cluster.prefix_directory import PrefixDirectory
from planning.simulator.cluster.simulated_autoscaler import SimulatedAutoscaler
from planning.simulator.cluster.simulated_request import SimulatedRequest
from planning.simulator.cluster.simulated_router import SimulatedRouter, record_of
from planning.simulator.cluster.simulated_worker import SimulatedWorker, SimulatedWorkerSettings
from planning.simulator.cluster.snapshot_board import SnapshotBoard
from planning.simulator.cluster.workers_side import WorkersSide
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.worker_profile import WorkerProfile
from planning.simulator.results import SimulationResult, WorkerResult, result_of
from router.routing.policies import make_policy
from router.routing.policy import RouteSettings, route_settings

FINE_BLOCK_TOKENS = 64
"""Number of tokens in a KV block, if the trace has no prefixes."""


def simulate(
    requests: Sequence[TracedRequest],
    shape: ClusterShape,
    config: Config,
    *,
    routers: int = 1,
    trace_block: int = 512,
    block_tokens: int = 0,
    seed: int = 0,
    leaps: bool = True,
) -> SimulationResult:
    """Simulate a cluster that serves ``requests``, which are in the order of their arrival times.

    ``config`` is that of `baton serve`: policy, classes, SLOs, admission, local prefill, and the
    autoscaler, which only changes roles; its pools are ignored. ``routers`` get the requests in
    turn. ``trace_block`` is the number of
    tokens per hash of the trace. ``block_tokens`` is the number of tokens of a KV block and of an
    index block, a divisor of ``trace_block``; 0 takes the trace's own if it has hashes, and 64
    otherwise. ``seed`` is for policies that choose at random. If ``leaps`` is false, each step is
    processed singly, which is much slower and gives the same result. Raises ConfigError.
    """
    block = block_tokens or _usual_block(requests, trace_block)
    hashed = any(request.block_hashes for request in requests)
    if hashed and trace_block % block:
        raise ConfigError(f"KV blocks of {block} tokens do not divide the trace's {trace_block}")
    events, directory = EventQueue(), PrefixDirectory()
    side = WorkersSide(events)
    slo_s = config.slo_tpot_s if shape.paces_chunks else None
    own = SimulatedWorkerSettings(block, slo_s, leaps, config.max_model_len)
    hosts = [Host(f"host-{number}", events) for number in range(shape.hosts)]
    workers = [
        SimulatedWorker(
            number, role, profile, own, events, side, directory.apply, host=_host_of(hosts, place)
        )
        for number, (role, profile, place) in enumerate(_places(shape))
    ]
    board = SnapshotBoard(workers, routers, events)
    routes, records = _routes(config, shape, block), [record_of(worker) for worker in workers]
    dice = random.Random(seed)  # noqa: S311 - the order of rows, no secret
    each_router = [
        SimulatedRouter(
            number,
            config,
            make_policy(config.policy, routes, seed + number),
            workers,
            # Routers list the workers in orders of their own: see ``TableSync``.
            dice.sample(records, len(records)) if routers > 1 else records,
            block,
            directory,
            board,
            side,
            events,
        )
        for number in range(routers)
    ]
    each: list[SimulatedRequest] = []

    def arrive() -> None:
        number = len(each)
        # Created here, since a trace's prompts are large.
        request = SimulatedRequest(
            number, requests[number], trace_block if hashed else block, block
        )
        each.append(request)
        expect_arrival()
        each_router[number % routers].arrive(request)

    def expect_arrival() -> None:
        if len(each) < len(requests):
            events.at(requests[len(each)].arrival_s, arrive, ARRIVAL)

    expect_arrival()
    autoscaler = None
    if config.autoscaler.enabled:

        def is_over() -> bool:
            return len(each) == len(requests) and all(one.ended_s is not None for one in each)

        autoscaler = SimulatedAutoscaler(config, workers, each_router, side, events, is_over)
        autoscaler.start()
    events.run()
    result = _result(each, workers, [role for role, *_ in _places(shape)])
    changes = () if autoscaler is None else tuple(autoscaler.changes)
    return replace(
        result,
        role_changes=changes,
        index_pairs=len(directory),
        snapshots_read=board.snapshots_read,
    )


def _usual_block(requests: Sequence[TracedRequest], trace_block: int) -> int:
    hashed = any(request.block_hashes for request in requests)
    return trace_block if hashed else FINE_BLOCK_TOKENS


def _places(shape: ClusterShape) -> Iterator[tuple[str, WorkerProfile, int]]:
    """Yield the role, the profile and the index within its role for each worker."""
    yield from (("prefill", shape.prefill_profile, place) for place in range(shape.prefill))
    yield from (("decode", shape.decode_profile, place) for place in range(shape.decode))


def _host_of(hosts: Sequence[Host], place: int) -> Host | None:
    return hosts[place % len(hosts)] if hosts else None


def _routes(config: Config, shape: ClusterShape, block: int) -> RouteSettings:
    """Return the settings by which the simulated router finds routes.

    Workers fetch no blocks from others; colocated ones compute what they decode.
    """
    settings = replace(route_settings(config), hash_block=block, pulls=False)
    if not shape.is_colocated:
        return settings
    classes = {
        name: replace(route, local_prefill="always") for name, route in settings.classes.items()
    }
    return replace(settings, classes=classes)


def _result(
    requests: Sequence[SimulatedRequest], workers: Sequence[SimulatedWorker], roles: Sequence[str]
) -> SimulationResult:
    """Collect the results of a simulation. ``roles`` are the workers' initial roles, those of their
    pools.
    """
    found = tuple(result_of(request, workers) for request in requests)
    return SimulationResult(
        requests=found,
        workers=tuple(
            WorkerResult(
                worker.name,
                role,
                worker.work,
                worker.scheduler.preemptions,
                worker.wire.sent_bytes,
                worker.wire.busy_s,
            )
            for worker, role in zip(workers, roles, strict=True)
        ),
        span_s=max(
            [result.ended_s for result in found] + [worker.work.ended_s for worker in workers]
        ),
    )
