"""Computes the figures of a simulation that `baton simulate` prints and writes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from baton.config.cluster import Config
from planning.simulator.cluster.step_log import Floats
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.step_model import Peak
from planning.simulator.results import RequestResult, SimulationResult, WorkerResult

PERCENTILES = (50, 95, 99)


def is_good(request: RequestResult, config: Config) -> bool:
    """Return whether a request met every SLO. Shed and failed requests do not. The TPOT SLO does
    not apply to a request with a single output token."""
    if not request.ok:
        return False
    slo_ttft_s = config.slo_ttft_of(config.class_of(request.input_tokens))
    is_paced = math.isnan(request.tpot_s) or request.tpot_s <= config.slo_tpot_s
    return request.ttft_s <= slo_ttft_s and is_paced


def summary(result: SimulationResult, shape: ClusterShape, config: Config) -> dict[str, Any]:
    """Return the figures of a simulation: seconds, requests per second and shares. A percentile of
    no values is null."""
    every = result.requests
    good = sum(is_good(request, config) for request in every)
    arrivals_s = max(result.arrivals_s, 1e-9)
    return {
        "requests": len(every),
        "ok": sum(request.ok for request in every),
        "shed": sum(request.was_shed for request in every),
        "failed": sum(not request.ok and not request.was_shed for request in every),
        "codes": _counts(request.code for request in every if not request.ok),
        "input_tokens": sum(request.input_tokens for request in every),
        "output_tokens": result.output_tokens,
        "cached_input_share": _share(
            sum(request.cached_tokens for request in every),
            sum(request.input_tokens for request in every),
        ),
        "local_share": _share(
            sum(bool(request.prefill) and request.prefill == request.decode for request in every),
            len(every),
        ),
        "preemptions": sum(worker.preemptions for worker in result.workers),
        "span_s": result.span_s,
        "offered_per_s": len(every) / arrivals_s,
        "goodput_per_s": good / arrivals_s,
        "goodput_per_gpu_s": good / arrivals_s / shape.gpus,
        "slo_attainment": _share(good, len(every)),
        "slo": {
            "ttft_s": {one.name: config.slo_ttft_of(one.name) for one in config.classes},
            "tpot_s": config.slo_tpot_s,
        },
        "latency": latencies(every),
        "classes": {
            one.name: {"requests": len(members)} | latencies(members)
            for one in config.classes
            if (members := [r for r in every if config.class_of(r.input_tokens) == one.name])
        },
        "pools": {
            role: _pool(pool, result.span_s, shape.profile_of(role).costs.peak)
            for role in ("prefill", "decode")
            if (pool := [worker for worker in result.workers if worker.role == role])
        },
    }


def latencies(requests: Sequence[RequestResult]) -> dict[str, dict[str, float | None]]:
    """Return mean and percentiles of each latency over the completed requests."""
    done = [request for request in requests if request.ok]
    gaps = [request.itl_s for request in done]
    return {
        "ttft_s": percentiles(_each(done, lambda request: request.ttft_s)),
        "tpot_s": percentiles(_each(done, lambda request: request.tpot_s)),
        "itl_s": percentiles(np.concatenate(gaps) if gaps else np.empty(0)),
        "e2el_s": percentiles(_each(done, lambda request: request.e2el_s)),
    }


def percentiles(values: Floats) -> dict[str, float | None]:
    """Return p50, p95, p99 and the mean of the finite values. Percentiles are interpolated between
    neighbors.
    """
    known = values[~np.isnan(values)]
    if not len(known):
        return dict.fromkeys([*(f"p{one}" for one in PERCENTILES), "mean"])
    found = np.percentile(known, PERCENTILES)
    named = {f"p{one}": float(value) for one, value in zip(PERCENTILES, found, strict=True)}
    return {**named, "mean": float(known.mean())}


def _each(requests: Iterable[RequestResult], of: Callable[[RequestResult], float]) -> Floats:
    return np.array([of(request) for request in requests], dtype=np.float64)


def _pool(
    workers: Sequence[WorkerResult], wall_s: float, peak: Peak | None
) -> dict[str, float | None]:
    span_s = max(wall_s, 1e-9) * len(workers)
    busy_s = sum(worker.work.busy_s for worker in workers)
    steps = sum(worker.work.steps for worker in workers)
    decoded = sum(worker.work.decoded_tokens for worker in workers)
    return {
        "workers": len(workers),
        "busy_share": busy_s / span_s,
        "busiest_share": max(worker.work.busy_s for worker in workers) / max(wall_s, 1e-9),
        "steps": steps,
        "prompt_tokens": sum(worker.work.prompt_tokens for worker in workers),
        "decoded_tokens": decoded,
        "mean_batch": _share(decoded, steps),
        "sent_bytes": sum(worker.sent_bytes for worker in workers),
        "wire_share": sum(worker.wire_s for worker in workers) / span_s,
        **utilization(workers, busy_s, span_s, peak),
    }


def utilization(
    workers: Sequence[WorkerResult], busy_s: float, span_s: float, peak: Peak | None
) -> dict[str, float | None]:
    """Return MFU and MBU of workers with the same ``peak``; null if the peak is unknown.

    They are relative to the seconds in which the engines ran (``busy_s``), and to all seconds
    (``span_s``), of all workers together.

    MFU: FLOPs that the model needs for the computed tokens, over those of the peak (Chowdhery et
    al., PaLM, 2022, appendix B, forward only). MBU: the weights once per step and the KV that is
    read or written, over the bytes of the peak (Databricks, LLM Inference Performance Engineering,
    2023).
    """
    flops = sum(worker.work.flops for worker in workers)
    moved = sum(worker.work.memory_bytes for worker in workers)
    return {
        "mfu_busy": None if peak is None else _share(flops, busy_s * peak.flops_per_s),
        "mfu_wall": None if peak is None else _share(flops, span_s * peak.flops_per_s),
        "mbu_busy": None if peak is None else _share(moved, busy_s * peak.bytes_per_s),
        "mbu_wall": None if peak is None else _share(moved, span_s * peak.bytes_per_s),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _counts(words: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for word in words:
        found[word] = found.get(word, 0) + 1
    return dict(sorted(found.items()))
