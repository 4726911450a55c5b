"""The order in which the kernel ends processes when memory is full, and whether it has ended one.

When no memory is left, the kernel ends the process with the highest score: its share of the memory
in thousandths, plus its ``oom_score_adj``. See proc(5).

Workers raise theirs: a worker is replaced, and its requests move. The router, the store and the
supervisor keep that of the process that started them, so that they outlive a worker of any size.
The raise is small: a neighbor that fills the host still has a higher score than a worker.

Ray gives each of its worker processes 1000, with which the kernel would end all of them before the
neighbor. Nodes that Baton starts do not (``deploy.ray.ray_cluster``). On others, Baton's actors go
back to the score of their raylet.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from pathlib import Path

WORKER_POINTS = 100
"""Raise of every worker, in thousandths of the memory: a router or store would have to use a tenth
of the memory more than the worker to be ended before it."""
SIZE_POINTS = 100
"""Further raise of a worker that uses all of the memory; others get their share of it."""
_MAX = 1000
_RECENT_S = 10.0
"""Time within which a death is noticed after the kernel has ended the process, in seconds."""


def oom_score(process: int | str = "self") -> int:
    """Return the ``oom_score_adj`` of a process, from -1000 to 1000; 0 on a system without it."""
    try:
        return int(Path(f"/proc/{process}/oom_score_adj").read_text())
    except (OSError, ValueError):
        return 0


def set_oom_score(score: int) -> None:
    """Set the ``oom_score_adj`` of this process.

    Raising it needs no privilege. Lowering it needs none back to where the process began, unless a
    privileged process has raised it: then it stays.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(str(min(score, _MAX)))


def inherited_oom_score() -> int:
    """Return the ``oom_score_adj`` of this process's parent, which a process of Ray has without
    Ray's own raise."""
    return oom_score(os.getppid())


def worker_points(used: int, limit: int) -> int:
    """Return how much a worker raises its ``oom_score_adj``: the more, the more memory it uses.

    ``used`` is its resident memory, and ``limit`` that of the host or container, in bytes; 0 if it
    is unknown.
    """
    share = min(1.0, used / limit) if limit else 0.0
    return WORKER_POINTS + round(SIZE_POINTS * share)


class OomKills:
    """Notices that the kernel has ended processes for lack of memory. Owned by one thread.

    The kernel counts them in the cgroup of the ended process. A process can read the count of its
    own cgroup without a privilege, but not which process was ended.
    """

    def __init__(self, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> None:
        counters = (path for path in _counters(proc, cgroups) if _kills(path) is not None)
        self._counter = next(counters, None)
        self._seen = self._count()
        self._recent: deque[float] = deque()

    def look(self, now: float) -> None:
        """Read the count. Call this regularly, at the monotonic time ``now`` in seconds."""
        count = self._count()
        self._recent.extend([now] * min(count - self._seen, _MAX))
        self._seen = count
        while self._recent and now - self._recent[0] > _RECENT_S:
            self._recent.popleft()

    def take(self, now: float) -> bool:
        """Return whether the kernel has recently ended a process of this cgroup that no earlier
        call has explained."""
        self.look(now)
        if not self._recent:
            return False
        self._recent.popleft()
        return True

    def _count(self) -> int:
        return 0 if self._counter is None else _kills(self._counter) or 0


def _counters(proc: Path, cgroups: Path) -> list[Path]:
    """Return the files that may have the count of this process's cgroup, best first."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        number, kinds, path = line.split(":", 2)
        below = path.lstrip("/")
        # A container may see its own cgroup as the root, whatever its path says.
        if "memory" in kinds.split(","):
            memory = cgroups / "memory"
            found += [one / "memory.oom_control" for one in (memory / below, memory)]
        elif number == "0":
            found += [one / "memory.events" for one in (cgroups / below, cgroups)]
    return found


def _kills(counter: Path) -> int | None:
    """Return the count in a file; None if it has none."""
    try:
        lines = counter.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
    except (OSError, ValueError, IndexError, StopIteration):
        return None
