"""The ways on which KV blocks travel between workers on GPUs, and how fast each is taken to be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from planning.simulator.costs.analytical_costs import DEFAULT_EFFICIENCY
from planning.simulator.costs.hardware import Accelerator

MACHINE_GPUS = 8
"""GPUs of a machine with links between them: a DGX's, and what clouds rent."""
_GRPC_BYTES_PER_S = 1.6e9
"""Of one worker: what docs/handoff.md measured between two processes that shared two cores."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One value of the configuration's ``transport``."""

    name: str
    needs: str
    """What it takes, for people."""
    gpu_bytes_per_s: Callable[[Accelerator], float] | None
    """One way, of one GPU's share; None: a profile knows itself what it measured."""
    worker_most: float = float("inf")
    """Bytes per second of a worker, however many GPUs it has."""
    one_machine: bool = False
    """Whether all workers must be in one machine."""

    def bytes_per_s(self, gpu: Accelerator, gpus: int) -> float:
        """Of a worker with so many GPUs, one way."""
        assert self.gpu_bytes_per_s is not None, "a profile's own wire has no table"
        share = self.gpu_bytes_per_s(gpu) * DEFAULT_EFFICIENCY.wire
        return min(share * gpus, self.worker_most)


def _network(gpu: Accelerator) -> float:
    return gpu.network_bytes_per_s


def _link(gpu: Accelerator) -> float:
    return gpu.link_bytes_per_s


AS_MEASURED = Transport("auto", "what the profile was measured with", None)
TRANSPORTS: Mapping[str, Transport] = {
    one.name: one
    for one in (
        # Those that ask for less come first: of plans at one price the first is taken.
        Transport("grpc", "any network", _network, _GRPC_BYTES_PER_S),
        Transport("nixl", "a network with RDMA", _network),
        Transport("nccl", "a network with RDMA", _network),
        Transport("cuda_ipc", "one machine with links", _link, one_machine=True),
    )
}
"""Of GPUs. Shared memory (``shm``) and gloo carry blocks of CPUs."""
DEFAULT_TRANSPORTS = ("grpc", "nixl", "cuda_ipc")
