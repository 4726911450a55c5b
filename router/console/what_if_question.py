"""What a what-if question is made of: the present traffic, the present workers, other ratios.

The router asks, ``planning.what_if`` answers; the two are processes, and this is what goes between.
Plain data and pure functions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from baton.config.cluster import Config
from baton.errors import InvalidRequest, Unavailable
from baton.store.registry import WorkerRecord
from router.core.fields import Int
from router.core.request_recorder import RecentRequest

TRAFFIC_S = 600.0
"""The present traffic is that of so many seconds."""
MIN_REQUESTS, MAX_REQUESTS = 10, 400
MAX_WORKERS = 64
_VALUE_BYTES = {"float32": 4.0, "bfloat16": 2.0, "float16": 2.0, "int8": 1.0, "fp8": 1.0}
_CALL_S = 0.0005
"""A message between router and worker, one way."""
_MAX_BYTES_PER_S = 1e12
"""Of a wire whose time computing hides."""
_CHUNK_TOKENS = {True: 512, False: 8192}
"""Of a worker on a CPU, or not, whose pool does not say."""
_CPU_CHUNK_KEYS = 1 << 19
"""As ``engine.engine`` bounds a CPU's chunks."""


class _Data(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class WhatIfRequest(BaseModel):
    """What an operator asks."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prefill: Int = Field(ge=0, le=MAX_WORKERS)
    """Prefill workers; 0: decode workers compute the prompts too."""
    decode: Int = Field(ge=1, le=MAX_WORKERS)
    rate: float = Field(1.0, ge=0.1, le=20)
    """Times the present rate of requests."""


class Shape(_Data):
    """How many workers of each role."""

    prefill: int
    decode: int


class Arrival(_Data):
    """One request of the traffic."""

    at_s: float
    """Seconds after the first one."""
    input_tokens: int
    output_tokens: int
    cached_tokens: int
    """Of the prompt, that were found in a cache."""


class Question(_Data):
    """All that the simulator needs."""

    config: dict[str, Any]
    """Fields of ``baton.config.cluster.Config``; no secrets."""
    profiles: dict[str, dict[str, Any]]
    """A worker of each role, as `baton calibrate` writes it."""
    traffic: tuple[Arrival, ...]
    shapes: tuple[Shape, ...]
    """One answer each, in this order."""


class Percentile(_Data):
    """Seconds; None where no request has the figure."""

    p50: float | None
    p95: float | None


class ShapeAnswer(_Data):
    """What the traffic would see with that many workers."""

    prefill: int
    decode: int
    ttft_s: Percentile
    tpot_s: Percentile
    e2el_s: Percentile
    good_share: float
    """Of all requests, within every SLO."""
    shed_share: float
    """Of all requests, refused."""
    prefill_busy: float | None
    """Share of the time in which the role's engines ran a step; None without such workers."""
    decode_busy: float


class Answer(_Data):
    """To one question."""

    requests: int
    seconds: float
    """From the first request to the last."""
    shapes: tuple[ShapeAnswer, ...]


def question(
    asked: WhatIfRequest,
    recent: Sequence[RecentRequest],
    workers: Sequence[WorkerRecord],
    config: Config,
    *,
    transfer_line: tuple[float, float],
    share: float = 1.0,
    is_cpu: bool,
) -> Question:
    """``recent`` in the order of arrival; ``transfer_line``: milliseconds a + b*blocks that

    computing does not hide of a handoff. ``share``: of the cluster's requests, that are in
    ``recent``. ``is_cpu``: of workers whose pool leaves it open. Raises Unavailable where the
    present cannot be described, InvalidRequest where there was too little traffic.
    """
    lengths = [one.output_tokens for one in recent if one.output_tokens]
    if len(recent) < MIN_REQUESTS or not lengths:
        raise InvalidRequest(
            f"{len(recent)} requests ended in the last {TRAFFIC_S / 60:.0f} minutes, and what-if"
            f" needs {MIN_REQUESTS}: ask again when there is traffic"
        )
    usual = max(1, round(sum(lengths) / len(lengths)))
    latest = recent[-MAX_REQUESTS:]
    begun, pace = latest[0].received_at, asked.rate / share
    present = Shape(prefill=_count(workers, "prefill"), decode=max(1, _count(workers, "decode")))
    return Question(
        config=config.model_dump(
            mode="json", exclude={"keys", "tenants", "redis_url", "gcs_store", "autoscaler"}
        ),
        profiles={
            role: _profile(_one(workers, role), config, transfer_line, is_cpu=is_cpu)
            for role in ("prefill", "decode")
        },
        traffic=tuple(
            Arrival(
                at_s=(one.received_at - begun) / pace,
                input_tokens=one.prompt_tokens,
                output_tokens=one.output_tokens or usual,
                cached_tokens=min(one.cached_tokens, one.prompt_tokens - 1),
            )
            for one in latest
        ),
        shapes=(present, Shape(prefill=asked.prefill, decode=asked.decode)),
    )


def _count(workers: Sequence[WorkerRecord], role: str) -> int:
    return sum(one.role == role for one in workers)


def _one(workers: Sequence[WorkerRecord], role: str) -> WorkerRecord:
    """One of the role, or where there is none any other. Raises Unavailable."""
    known = [one for one in workers if any(one.prefill_cost) and any(one.step_cost)]
    if not known:
        raise Unavailable(
            "no worker has told what its steps cost: it does once it has started and calibrated"
        )
    return min(known, key=lambda one: (one.role != role, one.slot))


def _profile(
    record: WorkerRecord, config: Config, transfer_line: tuple[float, float], *, is_cpu: bool
) -> dict[str, Any]:
    """As ``planning.simulator.costs.worker_kinds.profile_fields``."""
    shape = record.geometry
    token_bytes = 2.0 * shape.layers * shape.kv_heads * shape.head_dim
    token_bytes *= _VALUE_BYTES.get(shape.kv_dtype, 2.0)
    handoff_ms, block_ms = transfer_line
    block_bytes = token_bytes * config.block_size
    wire = block_bytes / (block_ms / 1e3) if block_ms > 0 else math.inf
    pool = next((one for one in config.pools if one.name == record.pool), None)
    on_cpu = is_cpu if pool is None or pool.device == "auto" else pool.device == "cpu"
    chunk = 0 if pool is None else pool.chunk_tokens
    return {
        "version": 1,
        "name": record.slot,
        "prefill": list(record.prefill_cost),
        "step": list(record.step_cost),
        "kv_tokens": record.total_blocks * shape.block_size,
        "kv_token_bytes": token_bytes,
        "layers": shape.layers,
        "context_length": record.context_length,
        "wire_bytes_per_s": min(wire, _MAX_BYTES_PER_S),
        "max_sequences": record.max_sequences,
        "chunk_tokens": chunk or _CHUNK_TOKENS[on_cpu],
        "chunk_keys": _CPU_CHUNK_KEYS if on_cpu else 0,
        "is_cpu": on_cpu,
        "handoff_s": handoff_ms / 1e3,
        "call_s": _CALL_S,
    }


def rate_share(own: float, all_requests: Sequence[float]) -> float:
    """Of the requests of all processes behind the port, those of this one; 1 where none came."""
    total = sum(all_requests)
    return min(1.0, own / total) if total and own else 1.0
