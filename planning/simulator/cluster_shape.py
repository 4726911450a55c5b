"""The cluster that is simulated: how many workers of what kind."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import ConfigError
from planning.simulator.costs.worker_profile import WorkerProfile


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """With ``prefill`` 0 every worker computes prompts beside what it decodes (colocated)."""

    prefill: int
    """Prefill workers."""
    decode: int
    """Decode workers, or colocated ones."""
    prefill_profile: WorkerProfile
    decode_profile: WorkerProfile
    paces_chunks: bool = True
    """Whether a step with prompts and sequences that decode is kept within the SLO for TPOT, as
    Baton's workers do; without, prompts take what a step's ``chunk_tokens`` leave."""
    hosts: int = 0
    """Machines that they share, each role dealt out in turn; 0: each has a machine of its own."""

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 1:
            raise ConfigError(
                f"a cluster has at least one decode worker, not {self.prefill} prefill and "
                f"{self.decode} decode workers"
            )
        if self.hosts < 0:
            raise ConfigError(f"workers share no {self.hosts} hosts")

    @property
    def is_colocated(self) -> bool:
        """Whether both phases run in each worker."""
        return self.prefill == 0

    def profile_of(self, role: str) -> WorkerProfile:
        """Of the workers of ``role``, prefill or decode."""
        return self.prefill_profile if role == "prefill" else self.decode_profile

    @property
    def gpus(self) -> int:
        """All of them."""
        prefill, decode = self.prefill_profile, self.decode_profile
        return self.prefill * prefill.gpus + self.decode * decode.gpus
