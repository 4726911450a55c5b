"""The autoscaler's input at each look. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.config.choices import Role

ROLES: tuple[Role, Role] = ("prefill", "decode")


def other(role: Role) -> Role:
    """Return the other role: decode for prefill, prefill for decode."""
    return "decode" if role == "prefill" else "prefill"


class WorkerState(StrEnum):
    """State of a slot that should have a worker."""

    SERVING = "serving"
    STARTING = "starting"
    """The worker starts or restarts. It is expected to serve in its pool's role."""
    FAILED = "failed"
    """The worker fails to start: its slot is used and adds no capacity."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One slot that should have a worker."""

    slot: str
    pool: str
    number: int
    """Number of the slot in its pool. A pool that shrinks loses its highest slot."""
    role: Role
    """The role of the worker, or the role that a starting worker takes."""
    state: WorkerState
    incarnation: str = ""
    """Incarnation of the worker in the slot."""
    sequences: int = 0
    """Sequences that run or wait at the worker."""


@dataclass(frozen=True, slots=True)
class SloFigures:
    """How well one SLO was met since the last look, in counts of requests."""

    judged: float = 0.0
    missed: float = 0.0
    tight: float = 0.0
    """Number of requests that used more than half of the SLO, including requests that missed it."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The traffic since the last look, and its cost."""

    seconds: float
    """Time since the last look, in seconds."""
    input_tokens_per_s: float
    """Prompt tokens received per second, including those of rejected requests."""
    output_tokens_per_s: float
    """Output tokens that the received requests are expected to need, per second, including those of
    rejected requests."""
    prefill_s_per_token: float | None
    """Time that a prefill worker needs for one prompt token, in seconds; None: unknown."""
    decode_tokens_per_s: float | None
    """Output rate of one decode worker at the limit of the SLO; None: unknown."""
    decode_batch: float
    """Number of sequences that one decode worker runs at the rate ``decode_tokens_per_s``."""
    decode_sequences: float
    """Sequences that run or wait at decode workers now."""
    ttft: SloFigures
    """How well the TTFT SLO was met. Rejected requests count as missed."""
    tpot: SloFigures


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """One observation of the whole cluster."""

    workers: tuple[WorkerFigures, ...]
    demand: Demand | None
    """The traffic and its cost since the last look. None: a part of them is unknown, or too old to
    act on."""
