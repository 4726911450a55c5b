from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cluster_mark import ClusterMark
from deploy.run_directory import RunDirectory

SCRIPT = str(Path(__file__).with_name("ray_script.py"))
DEADLINE_S = 200.0


@pytest.mark.timeout(240)
def test_ray_listens_on_loopback_heals_an_actor_has_one_stand_by_and_its_own_death_is_noticed(
    mark: ClusterMark, run: RunDirectory
) -> None:
    command = [sys.executable, SCRIPT, mark.cluster_id, str(run.path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=DEADLINE_S, cwd=run.path, check=False
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout[done.stdout.index("{") :])
    assert seen["listening"] == ["127.0.0.1"]
    assert seen["first"][1] == seen["second"][1] == mark.cluster_id
    assert seen["first"][0] != seen["second"][0]
    assert seen["prepared"]
    assert seen["lost"] == "Ray's node manager"
    assert seen["stopped"]
    assert seen["stranger"] == "UNAUTHENTICATED"
    assert seen["dashboards"] == []
    assert (run.path / "ray-token").stat().st_mode & 0o777 == 0o600
