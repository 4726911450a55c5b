"""Measures how costs grow with the number of workers, the context and the concurrency.

All figures are processor times of the real objects, in microseconds. There is no network.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from baton.hashing import block_hashes, hash_key
from baton.request import LoadSnapshot, SequenceSpec
from baton.sampling_params import SamplingParams
from baton.store.held_blocks import held_by
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits
from engine.scheduling.sequence import Sequence as EngineSequence
from loadtest.research.timings.decision_time import joined
from planning.common.plots import Line, draw_lines
from router.routing.policies import make_policy
from router.routing.policy import ClassRoute, RouteRequest, RouteSettings
from router.routing.routing_state import RoutingState
from router.routing.worker_table import LoadColumns

WORKERS = (100, 300, 1000, 3000, 10_000, 20_000)
PROMPTS = (1000, 4000, 16_000, 64_000, 128_000)
BATCHES = (1, 8, 32, 64, 128, 256)
_BLOCK = 16
_DECISIONS = 200
_HOLDERS = 16

Measured = dict[str, list[float]]


def by_workers() -> Measured:
    """Return the router's times by number of workers: p50 and p99 of a decision, and to apply a
    snapshot of every worker."""
    found: Measured = {"decision, p50": [], "decision, p99": [], "snapshots of all workers": []}
    for workers in WORKERS:
        routing = _routing(workers)
        names = routing.table.incarnations()
        dice = random.Random(1)  # noqa: S311 - lengths and holders, no secret
        took = []
        for number in range(_DECISIONS):
            held = held_by({name: dice.randint(1, 128) for name in dice.sample(names, _HOLDERS)})
            request = RouteRequest(dice.randint(50, 4000))
            began = time.thread_time()
            decision = routing.decide(request, (), held, number * 0.002)
            took.append((time.thread_time() - began) * 1e6)
            routing.promise(decision, request, (), number * 0.002)
        found["decision, p50"].append(float(np.percentile(took, 50)))
        found["decision, p99"].append(float(np.percentile(took, 99)))
        found["snapshots of all workers"].append(_apply_us(routing, names))
    return found


def _apply_us(routing: RoutingState, names: Sequence[str]) -> float:
    loads = {name: LoadSnapshot(running=3, free_blocks=3000) for name in names}
    return _median_us(lambda: routing.table.set_loads(LoadColumns.of(loads), 0.0))


def by_context() -> Measured:
    """Return the router's times of a request by the prompt's length: to hash its blocks, and to
    choose workers among a thousand and record the promise."""
    found: Measured = {"hashing": [], "decision and promise": []}
    routing, key = _routing(1000), hash_key("scale")
    for tokens in PROMPTS:
        prompt = list(range(tokens))
        hashes = block_hashes(prompt, _BLOCK, key)
        found["hashing"].append(_median_us(partial(block_hashes, prompt, _BLOCK, key)))
        found["decision and promise"].append(_median_us(partial(_place, routing, tokens, hashes)))
    return found


def _place(routing: RoutingState, tokens: int, hashes: list[bytes]) -> None:
    request = RouteRequest(tokens)
    decision = routing.decide(request, hashes, {}, 0.0)
    routing.promise(decision, request, hashes, 0.0).ended(0.0)


def by_concurrency() -> Measured:
    """Return a worker's times to plan a decode step and to process its result, by the number of
    sequences in the step."""
    found: Measured = {"plan": [], "result": []}
    for batch in BATCHES:
        plan_us, result_us = [], []
        scheduler = _decoding(batch)
        for _ in range(64):
            began = time.thread_time()
            plan = scheduler.schedule()
            planned = time.thread_time()
            assert plan is not None, "sequences that decode need a step"
            sampled = tuple((7,) for _ in plan.rows)
            completed = time.thread_time()
            scheduler.complete(plan, StepResult(plan.step, sampled, 0.01))
            result_us.append((time.thread_time() - completed) * 1e6)
            plan_us.append((planned - began) * 1e6)
        found["plan"].append(float(np.median(plan_us)))
        found["result"].append(float(np.median(result_us)))
    return found


def _decoding(batch: int) -> Scheduler:
    pool = BlockPool(batch * 40)
    scheduler = Scheduler(pool, SchedulerLimits(_BLOCK, 8192, batch, 8192))
    for number in range(batch):
        spec = SequenceSpec(
            request_id=f"r{number}",
            attempt=0,
            router_id="router",
            token_ids=tuple(range(256)),
            prompt_length=256,
            sampling=SamplingParams(max_tokens=256, ignore_eos=True),
            context_class="",
            deadline_s=1e6,
        )
        sequence = EngineSequence(number, spec, stop_ids=(), hash_key=b"k")
        sequence.token_ids.append(7)
        scheduler.add_computed(sequence, pool.allocate(16), 256)
    return scheduler


def _routing(workers: int) -> RoutingState:
    settings = RouteSettings(_BLOCK, default=ClassRoute("auto"))
    return joined(workers, make_policy("predictive", settings, 1))


def _median_us(work: Callable[[], object], times: int = 9) -> float:
    took = []
    for _ in range(times):
        began = time.thread_time()
        work()
        took.append((time.thread_time() - began) * 1e6)
    return float(np.median(took))


def plots(workers: Measured, context: Measured, concurrency: Measured) -> dict[str, str]:
    """Return the plots as SVG by name. Raises ConfigError without the extra ``bench``."""
    each = (
        ("scale-workers", workers, WORKERS, "Router, by number of workers", "workers"),
        ("scale-context", context, PROMPTS, "Router, by prompt length", "prompt tokens"),
        ("scale-concurrency", concurrency, BATCHES, "Worker, by sequences in a step", "sequences"),
    )
    return {
        name: draw_lines(
            {
                label: Line([float(one) for one in at], [value / 1e3 for value in values], True)
                for label, values in measured.items()
            },
            title=title,
            x=x,
            y="ms of a core",
        )
        for name, measured, at, title, x in each
    }
