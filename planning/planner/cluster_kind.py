"""Kinds of clusters: the kinds of their workers, and a transport, without counts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.costs.analytical_costs import DEFAULT_EFFICIENCY
from planning.simulator.costs.hardware import ACCELERATORS, Accelerator
from planning.simulator.costs.worker_profile import WorkerProfile

MACHINE_GPUS = 8
"""Number of GPUs in a machine with links between them, as in a DGX and in cloud machines."""
_GRPC_BYTES_PER_S = 1.6e9
"""Bandwidth of one worker with the transport ``grpc``, in bytes per second.
docs/lab-notes/transfers.md has the measurement, which is between two processes that shared two
cores."""


@dataclass(frozen=True, slots=True)
class Transport:
    """One transport that a plan can choose: a value of the configuration's ``transport``, with its
    bandwidth.
    """

    name: str
    needs: str
    """Requirement of the transport, in words, such as ``any network``."""
    gpu_bytes_per_s: Callable[[Accelerator], float] | None
    """Function that returns the bandwidth of one GPU, one way. None for a measured profile, whose
    bandwidth is part of the profile."""
    worker_most: float = float("inf")
    """Maximum bandwidth of a worker in bytes per second, however many GPUs the worker has."""
    one_machine: bool = False
    """Whether all workers must be in one machine."""

    def bytes_per_s(self, gpu: Accelerator, gpus: int) -> float:
        """Return the bandwidth of a worker with ``gpus`` GPUs over this transport, one way."""
        assert self.gpu_bytes_per_s is not None, "a measured profile has its own bandwidth"
        share = self.gpu_bytes_per_s(gpu) * DEFAULT_EFFICIENCY.wire
        return min(share * gpus, self.worker_most)


def _network(gpu: Accelerator) -> float:
    return gpu.network_bytes_per_s


def _link(gpu: Accelerator) -> float:
    return gpu.link_bytes_per_s


AS_MEASURED = Transport("auto", "the transport of the profile's measurement", None)
TRANSPORTS: Mapping[str, Transport] = {
    one.name: one
    for one in (
        # Transports with lower requirements come first: the first of several plans at one price is
        # chosen.
        Transport("grpc", "any network", _network, _GRPC_BYTES_PER_S),
        Transport("nixl", "a network with RDMA", _network),
        Transport("nccl", "a network with RDMA", _network),
        Transport("cuda_ipc", "one machine with links", _link, one_machine=True),
    )
}
"""Transports that can move KV between GPUs, by name. The other two, shared memory (``shm``) and
gloo, move KV in CPU memory."""
DEFAULT_TRANSPORTS = ("grpc", "nixl", "cuda_ipc")


_MAX_WORKERS = 1024
"""Maximum number of workers of a pool that the configuration allows."""


class Counts(NamedTuple):
    """Number of workers in each pool. Without prefill workers, every decode worker also computes
    prompts.
    """

    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class WorkerKind:
    """One way to build a worker: its GPU, its profile and the GPU's price."""

    gpu: str
    """Name of an accelerator, or of a profile's file."""
    profile: WorkerProfile
    gpu_price: float
    """Price of a GPU per hour, in dollars."""

    @property
    def name(self) -> str:
        """Return the worker's name, such as ``h200``, or ``h200 x 2`` for two GPUs."""
        return self.profile.name

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of a worker, which is its degree of tensor parallelism."""
        return self.profile.gpus

    @property
    def price_per_hour(self) -> float:
        """Return the price of a worker per hour, in dollars."""
        return self.gpus * self.gpu_price

    def with_wire(self, transport: Transport) -> WorkerProfile:
        """Return the worker's profile, with the bandwidth of ``transport`` for KV transfers."""
        if transport.gpu_bytes_per_s is None:
            return self.profile
        wire = transport.bytes_per_s(ACCELERATORS[self.gpu], self.gpus)
        return replace(self.profile, wire_bytes_per_s=wire)


@dataclass(frozen=True, slots=True)
class ClusterKind:
    """A kind of cluster: the kinds of the workers in both pools, and the transport between them."""

    prefill: WorkerKind
    decode: WorkerKind
    transport: Transport

    @property
    def name(self) -> str:
        """Return a text such as ``h200 x 2 + h200, nixl``."""
        return f"{self.prefill.name} + {self.decode.name}, {self.transport.name}"

    def shape(self, counts: Counts) -> ClusterShape:
        """Return the cluster with these counts, in the form that the simulator needs.

        Workers that were measured while they shared a machine's cores are on that machine.
        """
        prefill = self.prefill.with_wire(self.transport)
        decode = self.decode.with_wire(self.transport)
        hosts = int(prefill.shares_cores and decode.shares_cores)
        return ClusterShape(counts.prefill, counts.decode, prefill, decode, hosts=hosts)

    def gpus(self, counts: Counts) -> int:
        """Return the GPUs of all workers."""
        return counts.prefill * self.prefill.gpus + counts.decode * self.decode.gpus

    def price_per_hour(self, counts: Counts) -> float:
        """Return the price of all workers per hour, in dollars."""
        prefill, decode = self.prefill.price_per_hour, self.decode.price_per_hour
        return counts.prefill * prefill + counts.decode * decode


@dataclass(frozen=True, slots=True)
class ResourceBudget:
    """Maximum resources of a cluster; either limit may be infinite."""

    gpus: float = float("inf")
    per_hour: float = float("inf")
    """Maximum price of the cluster, in dollars per hour."""

    def allows(self, kind: ClusterKind, counts: Counts) -> bool:
        """Return whether the budget suffices for a cluster with these workers."""
        gpus = kind.gpus(counts)
        if max(counts) > _MAX_WORKERS or (kind.transport.one_machine and gpus > MACHINE_GPUS):
            return False
        return gpus <= self.gpus and kind.price_per_hour(counts) <= self.per_hour

    def text(self) -> str:
        """Return the budget as text."""
        parts = [f"{self.gpus:g} GPUs"] if self.gpus < float("inf") else []
        parts += [f"${self.per_hour:g}/h"] if self.per_hour < float("inf") else []
        return " and ".join(parts)
