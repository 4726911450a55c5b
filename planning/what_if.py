"""Simulates the present traffic with other numbers of workers.

    python -m planning.what_if < question.json

The process reads a question, writes a line for each simulated cluster and exits. It runs at a lower
priority than serving processes, and exits after the router's deadline.

A request's cached tokens are the leading blocks of one prompt that all requests share, so that the
simulated caches hold about as much of the prompts as the live ones do.
"""

from __future__ import annotations

import math
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from baton.config.cluster import Config
from baton.errors import BatonError
from planning.common.traces import TracedRequest
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.worker_profile import profile_of
from planning.simulator.results import SimulationResult
from planning.simulator.simulation import simulate
from planning.simulator.summary import summary
from router.console.what_if import PastRequest, Percentile, Shape, ShapeAnswer, WhatIfQuestion


def answers(question: WhatIfQuestion) -> Iterator[ShapeAnswer]:
    """Simulate each cluster of a question, and yield the results. Raises ConfigError."""
    config = Config(**question.config)
    trace = _trace(question.traffic, config.block_size)
    for shape in question.shapes:
        yield _shape(shape, question, trace, config)


def _trace(traffic: Sequence[PastRequest], block: int) -> list[TracedRequest]:
    trace, fresh = [], 1 << 32
    for one in traffic:
        blocks = math.ceil(one.input_tokens / block)
        shared = min(one.cached_tokens // block, blocks)
        hashes = (*range(shared), *range(fresh, fresh + blocks - shared))
        fresh += blocks
        trace.append(TracedRequest(one.at_s, one.input_tokens, one.output_tokens, hashes))
    return trace


def _shape(
    shape: Shape, question: WhatIfQuestion, trace: Sequence[TracedRequest], config: Config
) -> ShapeAnswer:
    cluster = ClusterShape(
        shape.prefill,
        shape.decode,
        profile_of(question.profiles["prefill"], "prefill"),
        profile_of(question.profiles["decode"], "decode"),
        hosts=question.hosts,
    )
    # The KV block divides the trace's, because it is the live cluster's block.
    result: SimulationResult = simulate(
        trace, cluster, config, trace_block=config.block_size, block_tokens=config.block_size
    )
    found = summary(result, cluster, config)
    pools: dict[str, Any] = found["pools"]
    return ShapeAnswer(
        prefill=shape.prefill,
        decode=shape.decode,
        **{name: _percentile(found["latency"][name]) for name in ("ttft_s", "tpot_s", "e2el_s")},
        good_share=found["slo_attainment"],
        shed_share=found["shed"] / len(trace),
        prefill_busy=pools["prefill"]["busy_share"] if "prefill" in pools else None,
        decode_busy=pools["decode"]["busy_share"],
    )


def _percentile(found: dict[str, float | None]) -> Percentile:
    return Percentile(p50=found["p50"], p95=found["p95"])


_NICE = 10
_LATER_S = 10


def main() -> int:
    """Read a question, write its answers, and return the exit code."""
    os.nice(_NICE)
    question = WhatIfQuestion.model_validate_json(sys.stdin.buffer.read())
    # The router ends this process at the deadline; this alarm is for a router that is gone.
    signal.alarm(int(question.deadline_s) + _LATER_S)
    try:
        for one in answers(question):
            sys.stdout.write(f"{one.model_dump_json()}\n")
            sys.stdout.flush()
    except BatonError as error:
        print(error.message, file=sys.stderr)  # noqa: T201 - the process that started this one reads it
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
