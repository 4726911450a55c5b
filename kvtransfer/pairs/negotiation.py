"""Negotiates the transport between two workers, and checks whether their blocks fit.

Plain Python: data in, data out.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from functools import lru_cache

from baton.errors import GeometryMismatch, HandoffError
from baton.request import Geometry
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.reshard import check_convertible

TRANSPORTS = ("cuda_ipc", "shm", "nixl", "nccl", "grpc", "gloo")
"""Names of all transports, the best first.

Transports that copy once, within a device or host, come first. The fastest networks follow, then
transports that work anywhere. gloo comes after grpc, because grpc needs no new process group after
a failure.
"""


class Fit(enum.Enum):
    """How the blocks of two workers compare."""

    EQUAL = "equal"
    """The layouts are equal: whole blocks are sent unchanged."""
    SHARED = "shared"
    """Only tensor parallelism differs: each rank sends the heads that the other rank has, too."""
    CONVERTIBLE = "convertible"
    """Block size or KV type differ, so blocks are converted. Both workers must have a single
    rank."""


def rank_transports(offered: Collection[str], supported: Collection[str]) -> tuple[str, ...]:
    """Return the transports that the peer offers and this worker supports, the best first.

    Raises HandoffError, with both lists, if there is none.
    """
    common = tuple(name for name in TRANSPORTS if name in offered and name in supported)
    if not common:
        raise HandoffError(
            f"no transport in common: the peer has {_listed(offered)}; this worker has"
            f" {_listed(supported)}"
        )
    return common


@lru_cache(maxsize=64)
def check_geometry(source: Geometry, target: Geometry) -> Fit:
    """Check whether and how blocks of worker ``source`` can be used by worker ``target``.

    Results are cached, because each handoff checks the same few geometries. Raises
    GeometryMismatch, with both geometries, if the blocks cannot be used.
    """
    try:
        check_convertible(KvLayout.of(source), KvLayout.of(target))
        return _fit(source, target)
    except GeometryMismatch as error:
        raise GeometryMismatch(
            f"KV blocks do not fit: the source has {source}, the target has {target} ({error})"
        ) from error


def _fit(source: Geometry, target: Geometry) -> Fit:
    if source == target:
        return Fit.EQUAL
    if source.tensor_parallel == target.tensor_parallel == 1:
        return Fit.CONVERTIBLE
    if (source.block_size, source.kv_dtype) != (target.block_size, target.kv_dtype):
        raise GeometryMismatch(
            "workers with several ranks need the same block_size and kv_dtype on both sides"
        )
    if source.drafter is not None:
        raise GeometryMismatch(
            "workers with different tensor parallelism cannot exchange a drafter's KV: switch the "
            "draft model off, or give both pools the same degree"
        )
    return Fit.SHARED


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
