from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.processes.run_directory import ClusterMark, RunDirectory

SCRIPT = str(Path(__file__).with_name("ray_script.py"))
DEADLINE_S = 200.0
FULL = {"RAY_memory_usage_threshold": "0.001"}
"""With Ray's memory monitor the machine would be full, and each of Ray's workers would end."""


def seen_by_script(mark: ClusterMark, run: RunDirectory) -> dict[str, Any]:
    command = [sys.executable, SCRIPT, mark.cluster_id, str(run.path)]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        cwd=run.path,
        env=os.environ | FULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout[done.stdout.index('{"first"') :]))


@pytest.mark.timeout(400)
def test_ray_listens_on_loopback_uses_the_standby_heals_an_actor_and_its_death_is_noticed(
    mark: ClusterMark, run: RunDirectory
) -> None:
    """One Ray for all of it: to start one takes seconds."""
    seen = seen_by_script(mark, run)
    assert str(run.path) not in seen["imports from"], "the script's current folder"
    assert seen["listening"] == ["127.0.0.1"]
    assert seen["first"][1] == seen["second"][1] == mark.cluster_id
    assert seen["first"][0] != seen["second"][0]
    assert seen["oom scores"][0] == seen["oom scores"][1], "Ray raises it no more"
    assert seen["lost"] == "Ray's node manager"
    assert seen["stopped"]
    assert seen["stranger"] == "UNAUTHENTICATED"
    assert seen["unused"] == []
    assert seen["waits for a node"] == [True, False]
    assert seen["standby was taken"]
    assert (run.path / "ray-token").stat().st_mode & 0o777 == 0o600
