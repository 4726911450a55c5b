"""What the memory monitor of a Ray cluster that Baton did not start means for Baton's workers.

Ray's node manager (raylet) reads the monitor's settings from its environment. Nodes that Baton
starts run without it (``deploy.ray.ray_cluster``).
"""

from __future__ import annotations

import contextlib
import os

import psutil

OFF = ("RAY_memory_monitor_refresh_ms", "0")
"""The environment variable that switches the monitor off, and its value."""
_THRESHOLD = "RAY_memory_usage_threshold"
_DEFAULT_THRESHOLD = 0.95


def describe_memory_monitor(*, here: bool) -> str:
    """Return a sentence on the memory monitor of a Ray cluster that Baton joins; no text if it is
    off.

    ``here`` is whether a node of that cluster runs on this machine, whose settings can be read.
    Otherwise the variable of this process says whether an operator has switched it off. Call this
    before Ray is started, which sets the variable.
    """
    name, off = OFF
    environments = _raylets() if here else []
    told = environments or [dict(os.environ)]
    if all(one.get(name) == off for one in told):
        return ""
    thresholds = {one.get(_THRESHOLD, "") for one in environments if one.get(name) != off}
    used = max(map(_share, thresholds), default=_DEFAULT_THRESHOLD)
    known = "ends" if environments else "may end"
    return (
        f"Ray's memory monitor {known} workers and the supervisor whenever all programs of their "
        f"node together use {used:.0%} of its memory ({_THRESHOLD}), whichever program that is: "
        f"start Ray's nodes with {name}={off}, as `baton join` does"
    )


def _raylets() -> list[dict[str, str]]:
    """Return the environments of this machine's node managers, as far as this user may read
    them."""
    found = []
    for process in psutil.process_iter(["name"]):
        if process.info["name"] == "raylet":
            with contextlib.suppress(psutil.Error, OSError):
                found.append(process.environ())
    return found


def _share(threshold: str) -> float:
    try:
        return float(threshold)
    except ValueError:
        return _DEFAULT_THRESHOLD
