"""Defines the simulated cluster: the kinds and numbers of its workers."""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import ConfigError
from planning.simulator.costs.worker_profile import WorkerProfile


@dataclass(frozen=True, slots=True)
class ClusterShape:
    """Kinds and numbers of a cluster's workers.

    If ``prefill`` is 0, the cluster is colocated: every worker also computes prompts.
    """

    prefill: int
    """Number of prefill workers; 0 for a colocated cluster."""
    decode: int
    """Number of decode workers, or of colocated ones."""
    prefill_profile: WorkerProfile
    decode_profile: WorkerProfile
    paces_chunks: bool = True
    """Whether a step with prompts and decoding sequences is kept within the TPOT SLO, as in Baton's
    workers. Otherwise prompts use all of a step's ``chunk_tokens``."""
    hosts: int = 0
    """Number of machines that the workers share. The workers of each role are distributed over the
    machines in turn. 0 means one machine for each worker."""

    def __post_init__(self) -> None:
        if self.prefill < 0 or self.decode < 1:
            raise ConfigError(
                f"a cluster needs at least one decode worker, not {self.prefill} prefill and "
                f"{self.decode} decode workers"
            )
        if self.hosts < 0:
            raise ConfigError(f"workers cannot share {self.hosts} hosts")

    @property
    def is_colocated(self) -> bool:
        """Whether every worker computes both prompts and answers."""
        return self.prefill == 0

    def profile_of(self, role: str) -> WorkerProfile:
        """Return the profile of the workers of ``role``, prefill or decode."""
        return self.prefill_profile if role == "prefill" else self.decode_profile

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all workers."""
        prefill, decode = self.prefill_profile, self.decode_profile
        return self.prefill * prefill.gpus + self.decode * decode.gpus
