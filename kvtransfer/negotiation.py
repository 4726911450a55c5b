"""What two workers settle before blocks move: by which transport, and whether their blocks fit.

Plain Python: data in, data out.
"""

from __future__ import annotations

import enum
from collections.abc import Collection

from baton.errors import GeometryMismatch, HandoffError
from baton.request import Geometry
from kvtransfer.layout import KvLayout
from kvtransfer.plan import check_convertible

TRANSPORTS = ("cuda_ipc", "shm", "nixl", "nccl", "grpc", "gloo")
"""Best first: one copy within a device or host, then what networks do fastest, then what runs
anywhere. gloo comes after grpc, which needs no process group to be formed again after a failure."""


class Fit(enum.Enum):
    """How the blocks of two workers compare."""

    EQUAL = "equal"
    """Whole blocks move as they are."""
    CONVERTIBLE = "convertible"
    """Block size, tensor parallelism or KV type differ."""


def rank_transports(offered: Collection[str], supported: Collection[str]) -> tuple[str, ...]:
    """The transports that the peer offers and this worker supports, best first.

    Raises HandoffError, which names both lists, where there is none.
    """
    common = tuple(name for name in TRANSPORTS if name in offered and name in supported)
    if not common:
        raise HandoffError(
            f"no transport in common: the peer has {_listed(offered)}; here is {_listed(supported)}"
        )
    return common


def check_geometry(source: Geometry, target: Geometry) -> Fit:
    """Whether blocks of one worker can become those of another.

    Raises GeometryMismatch, which names both sides, where they cannot.
    """
    try:
        check_convertible(KvLayout.of(source), KvLayout.of(target))
    except GeometryMismatch as error:
        raise GeometryMismatch(
            f"KV blocks do not fit: the source has {source}, the target has {target} ({error})"
        ) from error
    return Fit.EQUAL if source == target else Fit.CONVERTIBLE


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"
