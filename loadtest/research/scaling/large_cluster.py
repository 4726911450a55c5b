"""Simulates a large cluster with several routers, and counts what the simulation costs."""

from __future__ import annotations

import gc
import math
import resource
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from baton.config.cluster import Config
from baton.host.process_tuning import keep_buffers
from loadtest.research.scaling.conversations import BLOCK_TOKENS, conversations
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.worker_profile import read_profile
from planning.simulator.results import RequestResult
from planning.simulator.simulation import simulate
from planning.simulator.summary import percentiles, summary

HERD_S = 0.05
"""Time in which a router of a small cluster does not see what another one has sent: the age of its
table."""


@dataclass(frozen=True, slots=True)
class LargeCluster:
    """A cluster and its traffic."""

    workers: int = 10_000
    """Number of workers; half of them prefill, half decode."""
    routers: int = 50
    requests: int = 200_000
    requests_per_worker_s: float = 9.0
    """Requests per second, divided by the number of workers of both roles."""
    profile: str = "h100"


@dataclass(frozen=True, slots=True)
class LargeClusterFigures:
    """Figures of the simulated cluster. Times are in virtual seconds if not said otherwise."""

    cluster: LargeCluster
    cpu_s: float
    """Processor time of the process, in seconds."""
    max_rss_bytes: int
    arrivals_s: float
    span_s: float
    ok: int
    refused: int
    slo_attainment: float
    ttft_s: dict[str, float | None]
    tpot_s: dict[str, float | None]
    cached_share: float
    local_share: float
    prefill_busy: float
    """Share of the time of arrivals in which a prefill worker computes, on average."""
    prefill_spread: float
    """Busy time of the busiest prefill worker divided by the mean."""
    decode_batch: float
    """Mean number of sequences in a decode step."""
    decode_spread: float
    """Decoded tokens of the busiest decode worker divided by the mean."""
    herded_share: float
    """Share of the prompts whose worker had got one from another router in the last
    ``HERD_S``."""
    random_herded_share: float
    """The same if each router chose among the workers of all such prompts at random."""
    snapshots_read_per_s: float
    """Load snapshots that a router reads per second of arrivals."""
    index_pairs: int
    """Pairs of block and worker in the prefix index at the end."""
    streams: int
    """Streams between routers and workers: one for each pair."""


def simulate_large(cluster: LargeCluster) -> LargeClusterFigures:
    """Simulate the cluster. Raises ConfigError."""
    keep_buffers()
    per_s = cluster.requests_per_worker_s * cluster.workers
    requests = list(conversations(cluster.requests, per_s))
    profile = read_profile(cluster.profile)
    prefill = cluster.workers // 2
    shape = ClusterShape(prefill, cluster.workers - prefill, profile, profile)
    config = Config()
    # Nearly all objects live until the end: looking at each of them again and again costs much.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    result = simulate(requests, shape, config, routers=cluster.routers, trace_block=BLOCK_TOKENS)
    figures = summary(result, shape, config)
    busy = np.array([one.work.busy_s for one in result.workers if one.role == "prefill"])
    decoded = np.array([one.work.decoded_tokens for one in result.workers if one.role == "decode"])
    herded = herded_shares(result.requests, cluster.routers)
    waits = np.array([one.ttft_s for one in result.requests if one.ok])
    return LargeClusterFigures(
        cluster=cluster,
        cpu_s=time.process_time(),
        max_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        arrivals_s=result.arrivals_s,
        span_s=result.span_s,
        ok=figures["ok"],
        refused=figures["shed"] + figures["failed"],
        slo_attainment=figures["slo_attainment"],
        ttft_s=percentiles(waits),
        tpot_s=figures["latency"]["tpot_s"],
        cached_share=figures["cached_input_share"],
        local_share=figures["local_share"],
        prefill_busy=float(busy.mean() / result.arrivals_s),
        prefill_spread=float(busy.max() / max(busy.mean(), 1e-9)),
        decode_batch=figures["pools"]["decode"]["mean_batch"],
        decode_spread=float(decoded.max() / max(decoded.mean(), 1e-9)),
        herded_share=herded[0],
        random_herded_share=herded[1],
        snapshots_read_per_s=result.snapshots_read / cluster.routers / result.arrivals_s,
        index_pairs=result.index_pairs,
        streams=cluster.routers * cluster.workers,
    )


def herded_shares(requests: Sequence[RequestResult], routers: int) -> tuple[float, float]:
    """Return ``herded_share`` and ``random_herded_share`` of requests, which go to the routers in
    turn by their numbers."""
    placed = sorted(
        (one.sent_s, one.number, one.prefill) for one in requests if one.sent_s is not None
    )
    last: dict[str, deque[tuple[float, int]]] = {}
    herded = 0
    for sent_s, number, worker in placed:
        lately = last.setdefault(worker, deque())
        while lately and lately[0][0] < sent_s - HERD_S:
            lately.popleft()
        herded += any(other != number % routers for _, other in lately)
        lately.append((sent_s, number % routers))
    per_s = len(placed) / max(placed[-1][0] - placed[0][0], 1e-9)
    others = per_s * (1 - 1 / routers) / len(last)
    return herded / len(placed), -math.expm1(-others * HERD_S)
