"""What a cluster is made of, before its workers are counted: kinds of workers, and a transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.analytical_costs import DEFAULT_EFFICIENCY
from planning.simulator.costs.hardware import ACCELERATORS, Accelerator
from planning.simulator.costs.worker_profile import WorkerProfile

MACHINE_GPUS = 8
"""GPUs of a machine with links between them: a DGX's, and what clouds rent."""
_GRPC_BYTES_PER_S = 1.6e9
"""Of one worker: what docs/lab-notes/transfers.md measured between two processes that shared two
cores."""


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


_MAX_WORKERS = 1024
"""Of a pool, by the configuration."""


class Counts(NamedTuple):
    """Workers of each pool; without prefill workers every worker does both."""

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One way to build a worker."""

    gpu: str
    """An accelerator's name, or a profile's file."""
    profile: WorkerProfile
    gpu_price: float
    """Dollars per GPU and hour."""

    @property
    def name(self) -> str:
        """``h200``, or ``h200 x 2``."""
        return self.profile.name

    @property
    def gpus(self) -> int:
        """Of a worker: its degree of tensor parallelism."""
        return self.profile.gpus

    @property
    def price_per_hour(self) -> float:
        """Of a worker, in dollars."""
        return self.gpus * self.gpu_price

    def with_wire(self, transport: Transport) -> WorkerProfile:
        """Its profile, with the bandwidth of a transport."""
        if transport.gpu_bytes_per_s is None:
            return self.profile
        wire = transport.bytes_per_s(ACCELERATORS[self.gpu], self.gpus)
        return replace(self.profile, wire_bytes_per_s=wire)


@dataclass(frozen=True, slots=True)
class ClusterKind:
    """The workers of both pools, and the way between them."""

    prefill: WorkerKind
    decode: WorkerKind
    transport: Transport

    @property
    def name(self) -> str:
        """For people: ``h200 x 2 + h200, nixl``."""
        return f"{self.prefill.name} + {self.decode.name}, {self.transport.name}"

    def shape(self, counts: Counts) -> ClusterShape:
        """As the simulator takes it."""
        return ClusterShape(
            counts.prefill,
            counts.decode,
            self.prefill.with_wire(self.transport),
            self.decode.with_wire(self.transport),
        )

    def gpus(self, counts: Counts) -> int:
        """Of all workers."""
        return counts.prefill * self.prefill.gpus + counts.decode * self.decode.gpus

    def price_per_hour(self, counts: Counts) -> float:
        """Of all workers, in dollars."""
        prefill, decode = self.prefill.price_per_hour, self.decode.price_per_hour
        return counts.prefill * prefill + counts.decode * decode


@dataclass(frozen=True, slots=True)
class ResourceBudget:
    """What there is at most; either may be unbounded."""

    gpus: float = float("inf")
    per_hour: float = float("inf")
    """Dollars."""

    def allows(self, kind: ClusterKind, counts: Counts) -> bool:
        """Whether there is enough for so many workers."""
        gpus = kind.gpus(counts)
        if max(counts) > _MAX_WORKERS or (kind.transport.one_machine and gpus > MACHINE_GPUS):
            return False
        return gpus <= self.gpus and kind.price_per_hour(counts) <= self.per_hour

    def text(self) -> str:
        """For people."""
        parts = [f"{self.gpus:g} GPUs"] if self.gpus < float("inf") else []
        parts += [f"${self.per_hour:g}/h"] if self.per_hour < float("inf") else []
        return " and ".join(parts)
