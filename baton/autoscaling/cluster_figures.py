"""What the autoscaler is told of a cluster at each look. Plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from baton.config.choices import Role

ROLES: tuple[Role, Role] = ("prefill", "decode")


def other(role: Role) -> Role:
    """The one that it is not."""
    return "decode" if role == "prefill" else "prefill"


class WorkerState(StrEnum):
    """Of a slot in which a worker is wanted."""

    SERVING = "serving"
    STARTING = "starting"
    """It will serve, or come back, in its pool's role."""
    FAILED = "failed"
    """It does not come up: a place that is taken, and no help."""


@dataclass(frozen=True, slots=True)
class WorkerFigures:
    """One slot in which a worker is wanted."""

    slot: str
    pool: str
    number: int
    """Of the slot, in its pool: a pool that shrinks loses the highest."""
    role: Role
    """That it plays, or will when it has come up."""
    state: WorkerState
    incarnation: str = ""
    """Of whoever serves there."""
    sequences: int = 0
    """That run or wait there."""


@dataclass(frozen=True, slots=True)
class SloFigures:
    """How one SLO was kept since the last look. Counts of requests."""

    judged: float = 0.0
    missed: float = 0.0
    tight: float = 0.0
    """That used more than half of it, the missed ones too."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What came since the last look, and what it costs."""

    seconds: float
    """From that look to this one."""
    input_tokens_per_s: float
    """Of the prompts that came, those that were refused too."""
    output_tokens_per_s: float
    """Of the answers to what came, those that were refused too."""
    prefill_s_per_token: float | None
    """Seconds of a prefill worker for a token of a prompt; None: not known."""
    decode_tokens_per_s: float | None
    """Of one decode worker that just keeps the SLO; None: not known."""
    decode_batch: float
    """Sequences that it runs then."""
    decode_sequences: float
    """That run or wait at decode workers now."""
    ttft: SloFigures
    """Refused requests count as missed."""
    tpot: SloFigures


@dataclass(frozen=True, slots=True)
class ClusterFigures:
    """A look at the whole cluster."""

    workers: tuple[WorkerFigures, ...]
    demand: Demand | None
    """None: something of it is not known, or too old to act on."""
