"""The last worker of a role is drained only by force, by whatever way that is asked."""

from __future__ import annotations

import json
import subprocess

import httpx

from deploy.cli.options.exit_codes import ExitCode
from tests.support.e2e.cluster import BATON, START_S, UpProcess


def baton(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [BATON, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )


def test_the_only_decode_worker_is_drained_by_force_alone(rough_cluster: UpProcess) -> None:
    up = rough_cluster
    url = f"{up.http}/v1/workers/decode-0"
    named = f"cluster {up.cluster_id} at {up.state.http} (model {up.model})"
    pid = up.state.processes["decode-0"]
    with httpx.Client(trust_env=False, timeout=START_S) as client:
        for path, body in (("drain", {}), ("role", {"role": "prefill"})):
            answer = client.post(f"{url}/{path}", json=body)
            assert answer.status_code == 409, answer.text
            assert answer.json()["error"]["code"] == "last_worker"
        shown = client.get(f"{up.http}/v1/cluster").json()
    assert (shown["id"], shown["model"]) == (up.cluster_id, up.model)
    assert {one["slot"]: one["is_last"] for one in shown["workers"]} == {
        "decode-0": True,
        "prefill-0": True,
    }
    words = ("drain", "decode-0", "--http", up.state.http)
    refused = baton(*words, "--yes")
    assert refused.returncode == ExitCode.REFUSED, refused.stderr
    assert f"decode-0 is the last ready decode worker of {named}" in refused.stderr
    unasked = baton(*words, "--force")
    assert unasked.returncode == ExitCode.REFUSED, unasked.stderr
    planned = baton(*words, "--dry-run")
    assert planned.returncode == 0, planned.stderr
    assert named in planned.stdout
    assert up.state.processes["decode-0"] == pid
    status = json.loads(baton("status", "--http", up.state.http, "-o", "json").stdout)
    assert status["cluster"] == up.cluster_id
    assert {worker["slot"]: worker["state"] for worker in status["workers"]} == {
        "decode-0": "ready",
        "prefill-0": "ready",
    }
    done = baton(*words, "--yes", "--force")
    assert done.returncode == 0, done.stderr
    assert f"decode-0 of {named} was drained" in done.stdout
    up.wait_for("decode-0 is back")
    assert up.state.processes["decode-0"] != pid
    up.wait_healthy()
