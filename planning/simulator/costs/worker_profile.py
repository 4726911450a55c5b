"""What one worker is: its costs, its memory, its limits, and its end of the wire."""

from __future__ import annotations

from dataclasses import dataclass

from planning.simulator.costs.sharing import ALONE, Sharing
from planning.simulator.costs.step_model import StepModel


@dataclass(frozen=True, slots=True)
class WorkerProfile:
    """Tokens, bytes, seconds."""

    name: str
    costs: StepModel
    kv_tokens: int
    """Tokens whose KV its pool holds."""
    kv_token_bytes: float
    """KV of one of them."""
    layers: int
    context_length: int
    """Most tokens of a sequence, by the model."""
    wire_bytes_per_s: float
    """At which KV leaves, and comes."""
    max_sequences: int = 256
    """Most in one step."""
    chunk_tokens: int = 8192
    """Most tokens in one step."""
    chunk_keys: int = 0
    """See ``engine.scheduling.scheduler.SchedulerLimits``."""
    is_cpu: bool = False
    """Whether it plans ahead as workers on CPUs do."""
    handoff_s: float = 0.002
    """What a handoff takes besides its bytes: the commit and its answer."""
    call_s: float = 0.0005
    """One message between router and worker, or between workers, one way."""
    gpus: int = 1
    """How many there are in it."""
    sharing: Sharing = ALONE
    """What others of its host cost it, where workers share one."""
