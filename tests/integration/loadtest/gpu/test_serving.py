"""The serving phase on a CPU: real workers, routers and a Valkey; one dies and one breaks.

On a GPU it was not run yet.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loadtest.gpu.common.results import Check, Fact, Result, Timing
from loadtest.gpu.serving.items import missing, serving_items

DEADLINE_S = 60.0
TIMINGS = {
    "answers": 0,
    "load": 6,
    "writer killed": 1,
    "poisoned context": 2,
}
"""How many each item gives on a CPU."""

pytestmark = [
    pytest.mark.timeout(300),
    # Equal bits on a CPU are a promise of its own kernels.
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler"),
]

KILLED_SCRIPT = """
import sys, time
from pathlib import Path
from loadtest.gpu.serving.items import serving_items
item = next(items := serving_items("cpu", small=True, folder=Path(sys.argv[1])))
item.work()
print("ready", flush=True)
time.sleep(600)
"""


def living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [each for each in processes if each.is_running() and each.status() != "zombie"]


@pytest.mark.long
def test_all_of_the_phase_holds_on_a_cpu(tmp_path: Path) -> None:
    assert missing() == []
    before = set(psutil.Process().children(recursive=True))
    found: dict[str, list[Result]] = {}
    for item in serving_items("cpu", small=True, folder=tmp_path):
        found[item.name] = list(item.work())
    checks = [each for results in found.values() for each in results if isinstance(each, Check)]
    # How far handoffs are when their writer dies depends on how busy this machine is.
    checks = [check for check in checks if check.name != "handoffs that ended before the kill"]
    assert [check for check in checks if not check.holds] == []
    timings = {
        name: sum(isinstance(each, Timing) for each in results) for name, results in found.items()
    }
    assert timings == TIMINGS
    facts = {
        each.name: each.values
        for results in found.values()
        for each in results
        if isinstance(each, Fact)
    }
    assert facts["handoffs"]["transports"] == {"shm": 6}
    assert facts["handoffs"]["bytes"] > 0
    assert facts["requests at concurrency 2"] == {"ok": 6, "failed": 0}
    assert facts["poisoned worker"]["exit_code"] == 1
    assert not living(list(set(psutil.Process().children(recursive=True)) - before))


@pytest.mark.long
def test_an_item_that_runs_alone_has_its_cluster_and_a_killed_parent_leaves_no_process(
    tmp_path: Path,
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", KILLED_SCRIPT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    try:
        assert parent.stdout.readline() == "ready\n"
        children = psutil.Process(parent.pid).children(recursive=True)
        # A Valkey, two workers, and two routers with a process each that renders chat templates.
        assert len(children) == 7
    finally:
        parent.kill()
        parent.wait(DEADLINE_S)
        parent.stdout.close()
    _, left = psutil.wait_procs(children, DEADLINE_S)
    assert not living(left)
