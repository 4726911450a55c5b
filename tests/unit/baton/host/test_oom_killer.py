"""Scores of real processes, and the kernel's counts in files like its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from baton.host.oom_killer import (
    SIZE_POINTS,
    WORKER_POINTS,
    OomKills,
    oom_score,
    worker_points,
)

GIB = 1 << 30
SCORES = """
import os, sys
from baton.host.oom_killer import *
set_oom_score(1000)
raised = oom_score()
set_oom_score(inherited_oom_score())
lowered = oom_score()
set_oom_score(inherited_oom_score() + WORKER_POINTS)
print(os.getppid(), raised, lowered, oom_score())
"""


def test_a_process_raises_its_score_and_goes_back_to_that_of_its_parent() -> None:
    own = oom_score()
    done = subprocess.run(
        [sys.executable, "-c", SCORES], capture_output=True, text=True, check=True, timeout=60
    )
    _, *scores = map(int, done.stdout.split())
    assert scores == [1000, own, min(1000, own + WORKER_POINTS)]


def test_a_larger_worker_raises_its_score_more_and_each_less_than_a_neighbor_needs() -> None:
    points = [worker_points(used * GIB, 100 * GIB) for used in (0, 1, 50, 100, 200)]
    assert points == [100, 101, 150, 200, 200]
    assert worker_points(GIB, 0) == WORKER_POINTS, "the memory is unknown"
    # A neighbor with a third of the memory goes before a worker with a tenth.
    assert WORKER_POINTS + SIZE_POINTS * 0.1 + 100 < 333


def write_count(counter: Path, kills: int) -> None:
    counter.parent.mkdir(parents=True, exist_ok=True)
    counter.write_text(f"low 0\noom 9\noom_kill {kills}\noom_group_kill 9\n")


def write_cgroup(proc: Path, lines: str) -> None:
    (proc / "self").mkdir(parents=True)
    (proc / "self/cgroup").write_text(lines)


@pytest.mark.parametrize(
    ("lines", "counter"),
    [
        ("0::/system.slice/baton.service\n", "system.slice/baton.service/memory.events"),
        # A container whose own cgroup is the root of what it sees.
        ("0::/../other\n", "memory.events"),
        ("3:cpuset:/a\n4:memory:/docker/1\n0::/\n", "memory/docker/1/memory.oom_control"),
        ("4:cpu,memory:/docker/1\n", "memory/memory.oom_control"),
    ],
)
def test_each_kill_of_its_cgroup_explains_one_death(
    tmp_path: Path, lines: str, counter: str
) -> None:
    cgroups = tmp_path / "cgroups"
    write_cgroup(tmp_path / "proc", lines)
    write_count(cgroups / counter, 3)
    kills = OomKills(tmp_path / "proc", cgroups)
    assert not kills.take(0.0), "those before it began"
    write_count(cgroups / counter, 5)
    kills.look(1.0)
    assert [kills.take(2.0) for _ in range(3)] == [True, True, False]
    write_count(cgroups / counter, 6)
    kills.look(3.0)
    assert not kills.take(60.0), "it was long ago"


def test_without_a_count_no_kill_is_known(tmp_path: Path) -> None:
    assert not OomKills(tmp_path, tmp_path).take(0.0)
    write_cgroup(tmp_path, "0::/\n")
    assert not OomKills(tmp_path, tmp_path).take(0.0)
