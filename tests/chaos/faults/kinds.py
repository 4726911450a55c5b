"""The kinds of faults, and what each needs to be struck. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Target = Literal["prefill", "decode", "router", "store", "cluster"]
"""The target of a fault: one worker, one router, the store, or all of them."""


@dataclass(frozen=True, slots=True)
class Kind:
    """``min_s`` and ``max_s``: how long it lasts, in seconds; 0 for what happens at once."""

    name: str
    target: Target
    min_s: float = 0.0
    max_s: float = 0.0
    may_restart: bool = False
    """Whether its victim may end by it, and is started again."""
    has_spare: bool = True
    """Whether others can do what its victims did: else requests may be refused meanwhile."""
    may_reset: bool = False
    """Whether the fault may break clients' connections, because their owner ends."""
    is_standstill: bool = False
    """Whether clients of its victims wait for its end, however long it lasts: their requests are
    nowhere else. Nothing else is done meanwhile, and recovery is counted from its end."""
    needs_launchers: bool = False
    """Whether it needs a cluster of two launchers (``tests.chaos.harness.led_cluster``)."""
    needs_plain_workers: bool = False
    """Whether it needs workers without a launcher (``tests.chaos.harness.plain_cluster``)."""


KINDS = (
    Kind("prefill killed", "prefill", may_restart=True),
    Kind("decode killed", "decode", may_restart=True),
    Kind("router killed", "router", may_restart=True, may_reset=True),
    # Some are shorter than any lease, some longer than all.
    Kind("prefill stopped", "prefill", 1.5, 7.0, may_restart=True),
    Kind("decode stopped", "decode", 1.5, 7.0, may_restart=True),
    # Some are shorter than a worker's lease, some as long as a machine takes to move.
    Kind("router stopped", "router", 1.5, 30.0, is_standstill=True),
    Kind("host stopped", "cluster", 2.0, 60.0, is_standstill=True),
    Kind("store killed", "store", 1.0, 6.0),
    Kind("store stopped", "store", 2.0, 7.0),
    Kind("store flushed", "store"),
    Kind("store slow", "store", 3.0, 6.0),
    Kind("store full", "store", 3.0, 7.0),
    Kind("store password changed", "store", 3.0, 7.0),
    Kind("store silent", "store", 3.0, 7.0),
    Kind("store hears nothing", "store", 3.0, 7.0),
    Kind("store resets", "store", 3.0, 7.0),
    Kind("prefill cut off", "prefill", 2.0, 7.0, may_restart=True),
    Kind("decode cut off", "decode", 2.0, 7.0, may_restart=True),
    Kind("decode hears nothing", "decode", 2.0, 7.0, may_restart=True),
    Kind("decode is not heard", "decode", 2.0, 7.0, may_restart=True),
    Kind("decode loses packets", "decode", 3.0, 6.0),
    Kind("decode without store", "decode", 6.0, 10.0, may_restart=True),
    Kind("decode without descriptors", "decode", 3.0, 6.0, may_restart=True),
    Kind("decode without memory", "decode", 3.0, 6.0, may_restart=True),
    Kind("host memory full", "cluster", 4.0, 8.0, may_restart=True, has_spare=False),
    Kind("folders full, prefill killed", "prefill", 3.0, 6.0, may_restart=True),
    Kind("folders full, decode killed", "decode", 3.0, 6.0, may_restart=True),
    Kind("disk full", "cluster", 3.0, 6.0),
    Kind("slow clients", "cluster", 6.0, 9.0),
    Kind("clock an hour ahead", "cluster", 4.0, 8.0),
    Kind("clock an hour behind", "cluster", 4.0, 8.0),
    Kind("prefill drained", "prefill", may_restart=True),
    Kind("decode drained", "decode", may_restart=True),
    Kind("router drained", "router", may_restart=True, may_reset=True),
    Kind("prefill role changed", "prefill", 2.0, 5.0),
    Kind("decode role changed", "decode", 2.0, 5.0),
    Kind("prefill pool gone", "prefill", may_restart=True),
    Kind("decode pool gone", "decode", may_restart=True, has_spare=False),
    Kind("prefill engine hangs", "prefill", 4.0, 8.0, may_restart=True),
    Kind("decode engine hangs", "decode", 4.0, 8.0, may_restart=True),
    Kind("store failed over", "store", 1.0, 4.0),
    Kind("supervisor killed", "cluster"),
    Kind("control store killed", "cluster"),
    Kind("control store's store killed", "cluster"),
)
"""Those of a cluster on one machine, which ends with its launcher."""


def _away(name: str, target: Target, *, may_restart: bool = False) -> Kind:
    """Another launcher leads after 15 s at most: each lasts for longer than that."""
    return Kind(name, target, 20.0, 40.0, may_restart=may_restart, needs_launchers=True)


def away_for(kind: Kind, seconds: float) -> Kind:
    """That kind, with launchers that are away for so long; any other kind as it is."""
    return replace(kind, min_s=seconds, max_s=seconds) if kind.needs_launchers else kind


LAUNCHER_KINDS = (
    _away("launcher away", "cluster"),
    _away("launcher stopped", "cluster"),
    _away("both launchers away", "decode", may_restart=True),
    _away("both launchers away, store failed over", "store"),
    _away("both launchers away, store emptied", "store"),
)
"""Those of a cluster of two launchers, whose workers outlive both."""
MODEL_KINDS = (
    Kind("model changes", "cluster", may_restart=True, needs_plain_workers=True),
    Kind("quantization changes", "cluster", may_restart=True, needs_plain_workers=True),
)
"""Those that change what the workers serve, one by one, and change it back."""
BY_NAME = {kind.name: kind for kind in (*KINDS, *LAUNCHER_KINDS, *MODEL_KINDS)}
