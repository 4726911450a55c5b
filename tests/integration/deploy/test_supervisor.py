"""The supervisor on a real Ray, over workers that load nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.processes.run_directory import ClusterMark, RunDirectory

SCRIPT = str(Path(__file__).with_name("supervisor_script.py"))
DEADLINE_S = 280.0
MAX_MIB = 160


def play(name: str, mark: ClusterMark, run: RunDirectory, redis_url: str) -> dict[str, Any]:
    command = [sys.executable, SCRIPT, name, mark.cluster_id, str(run.path), redis_url]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=run.path, check=False
    )
    log = run.log("supervisor")
    told = log.read_text() if log.exists() else ""
    assert done.returncode == 0, f"{done.stderr}\n{told}"
    seen: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return seen


def test_workers_are_replaced_by_a_supervisor_that_may_die_itself(
    mark: ClusterMark, run: RunDirectory, redis_url: str
) -> None:
    seen = play("lives", mark, run, redis_url)
    assert not seen["imports_torch"]
    assert seen["rss_mib"] < MAX_MIB
    assert seen["deaths_at_first"] == [0, 0, 0], "it takes over who lives"
    assert seen["killed"] == "killed by SIGKILL"
    assert seen["supervisor_replaced"]
    assert seen["deaths_remembered"] == 1
    crash = "killed by SIGABRT; its standard error ends with: memory allocation of 9 bytes failed"
    assert seen["crashed"] == crash
    assert seen["missed"] == [1, "its process has ended without a message to Ray"]
    assert "there is no such thing" in seen["cannot_start"]
    assert seen["others"]


@pytest.mark.long
def test_a_lost_nodes_worker_is_replaced_where_there_is_room(
    mark: ClusterMark, run: RunDirectory, redis_url: str
) -> None:
    seen = play("node", mark, run, redis_url)
    assert seen["waits"] == "starting"
    assert seen["replaced"]
    assert seen["error"]
    assert seen["near"]


@pytest.mark.long
def test_outdated_workers_are_replaced_one_by_one(
    mark: ClusterMark, run: RunDirectory, redis_url: str
) -> None:
    seen = play("rollout", mark, run, redis_url)
    assert seen["most_down"] == 1
    assert seen["deaths"] == 0
    assert "another version or configuration" in seen["said"]
