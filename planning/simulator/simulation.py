"""A cluster serves a trace in virtual time.

A discrete-event simulation around the objects that a live cluster runs: the router's admission,
planner and policy, the workers' schedulers, block pools, step planners and rule for room. Only the
engine's time and the wire's are a model, and Redis a directory in memory.
docs/explanation/simulator.md says
what is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from baton.config.cluster import Config
from baton.errors import ConfigError
from planning.common.traces import TracedRequest
from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.host import Host
from planning.simulator.cluster.prefix_directory import PrefixDirectory
from planning.simulator.cluster.simulated_autoscaler import SimulatedAutoscaler
from planning.simulator.cluster.simulated_request import SimulatedRequest
from planning.simulator.cluster.simulated_router import SimulatedRouter
from planning.simulator.cluster.simulated_worker import SimulatedWorker, SimulatedWorkerSettings
from planning.simulator.cluster.workers_side import WorkersSide
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.worker_profile import WorkerProfile
from planning.simulator.results import SimulationResult, WorkerResult, result_of
from router.routing.policies import make_policy
from router.routing.policy import RouteSettings, route_settings

FINE_BLOCK_TOKENS = 64
"""Of a KV block where the trace says nothing of prefixes."""


def simulate(
    requests: Sequence[TracedRequest],
    shape: ClusterShape,
    config: Config,
    *,
    trace_block: int = 512,
    block_tokens: int = 0,
    seed: int = 0,
    leaps: bool = True,
) -> SimulationResult:
    """Serve ``requests``, which come in the order of their times.

    ``config`` is that of `baton serve`: policy, classes, SLOs, admission, local prefill, and the
    autoscaler, which changes roles alone; its pools are not asked. ``trace_block``: tokens of a
    block of the trace's hashes. ``block_tokens``: tokens of a KV block and of the index, which
    divide that; 0 takes the trace's own where it has hashes, and 64 where it has none. ``seed`` is
    for policies that draw. ``leaps`` False sees every step for itself: slower by far, the same
    result. Raises ConfigError.
    """
    block = block_tokens or _usual_block(requests, trace_block)
    hashed = any(request.block_hashes for request in requests)
    if hashed and trace_block % block:
        raise ConfigError(f"{block} tokens of a KV block do not divide the trace's {trace_block}")
    events, directory = EventQueue(), PrefixDirectory()
    side = WorkersSide(events)
    slo_s = config.slo_tpot_s if shape.paces_chunks else None
    own = SimulatedWorkerSettings(block, slo_s, leaps, config.max_model_len)
    hosts = [Host(events) for _ in range(shape.hosts)]
    workers = [
        SimulatedWorker(
            number, role, profile, own, events, side, directory.apply, host=_host_of(hosts, place)
        )
        for number, (role, profile, place) in enumerate(_places(shape))
    ]
    policy = make_policy(config.policy, _routes(config, shape, block), seed)
    router = SimulatedRouter(config, policy, workers, block, directory, side, events)
    side.router = router
    each: list[SimulatedRequest] = []

    def arrive(number: int, traced: TracedRequest) -> None:
        # Made now: a trace's prompts are large.
        each.append(SimulatedRequest(number, traced, trace_block if hashed else block, block))
        router.arrive(each[-1])

    for number, traced in enumerate(requests):
        events.at(traced.arrival_s, partial(arrive, number, traced))
    autoscaler = None
    if config.autoscaler.enabled:

        def is_over() -> bool:
            return len(each) == len(requests) and all(one.ended_s is not None for one in each)

        autoscaler = SimulatedAutoscaler(config, workers, router, side, events, is_over)
        autoscaler.start()
    events.run()
    result = _result(each, workers, [role for role, *_ in _places(shape)])
    changes = () if autoscaler is None else tuple(autoscaler.changes)
    return replace(result, role_changes=changes)


def _usual_block(requests: Sequence[TracedRequest], trace_block: int) -> int:
    hashed = any(request.block_hashes for request in requests)
    return trace_block if hashed else FINE_BLOCK_TOKENS


def _places(shape: ClusterShape) -> Iterator[tuple[str, WorkerProfile, int]]:
    """Role, kind and place in its role of each worker."""
    yield from (("prefill", shape.prefill_profile, place) for place in range(shape.prefill))
    yield from (("decode", shape.decode_profile, place) for place in range(shape.decode))


def _host_of(hosts: Sequence[Host], place: int) -> Host | None:
    return hosts[place % len(hosts)] if hosts else None


def _routes(config: Config, shape: ClusterShape, block: int) -> RouteSettings:
    """Nothing is fetched from other workers; colocated workers compute what they decode."""
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
    """``roles`` in which the workers began: those of their pools."""
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
