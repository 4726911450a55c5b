"""What the kernel of this machine can tell."""

from __future__ import annotations

from pathlib import Path


def knows_exits() -> bool:
    """Whether this kernel is Linux 6.15 or newer."""
    release = Path("/proc/sys/kernel/osrelease").read_text().split(".")
    return (int(release[0]), int(release[1])) >= (6, 15)
