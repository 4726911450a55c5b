"""Processes of a real cluster are killed: clients get an answer or a clear error, and it heals."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from baton.host.oom_killer import SIZE_POINTS, WORKER_POINTS, oom_score
from tests.support.e2e.answers import answer_of
from tests.support.e2e.cluster import UpProcess, guardian

DEADLINE_S = 120.0


def stream(up: UpProcess, tokens: int) -> Iterator[str]:
    body = {
        "model": up.model,
        "prompt": "Once upon a time",
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    url = f"{up.http}/v1/completions"
    with httpx.stream("POST", url, json=body, timeout=DEADLINE_S) as answer:
        for line in answer.iter_lines():
            if line:
                yield line


def processes_with_supervisor(up: UpProcess) -> dict[str, int]:
    """The process ids of a cluster's parts; the supervisor starts after the cluster is ready."""
    deadline = time.monotonic() + DEADLINE_S
    while "supervisor" not in (pids := up.state.processes):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return dict(pids)


def test_the_kernel_ends_a_worker_before_router_store_and_supervisor(cluster: UpProcess) -> None:
    pids = processes_with_supervisor(cluster)
    scores = {name: oom_score(pid) for name, pid in pids.items()}
    own = oom_score()
    workers = {scores.pop(name) for name in ("prefill-0", "decode-0")}
    assert {"router", "valkey", "supervisor"} <= scores.keys()
    assert set(scores.values()) == {own}
    assert min(workers) >= own + WORKER_POINTS
    assert max(workers) <= own + WORKER_POINTS + SIZE_POINTS


@pytest.mark.parametrize("slot", ["decode-0", "prefill-0"])
def test_a_killed_worker_comes_back(rough_cluster: UpProcess, slot: str) -> None:
    # A decode worker has much to do: it must not end before it is killed.
    victim = psutil.Process(rough_cluster.state.processes[slot])
    lines = stream(rough_cluster, 1800 if slot.startswith("decode") else 400)
    first = next(lines)
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]
    for _ in range(5):
        next(lines)
    victim.kill()
    rest = list(lines)
    if slot.startswith("decode") and rest[-1] != "data: [DONE]":
        # No other worker was there, and this one was not back in time.
        assert "error" in json.loads(rest[-1].removeprefix("data: "))
    else:
        assert rest[-1] == "data: [DONE]"
        last = json.loads(rest[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
    rough_cluster.wait_for(f"{slot} is back")
    rough_cluster.wait_healthy()
    again = list(stream(rough_cluster, 5))
    assert again[-1] == "data: [DONE]"


def test_what_dies_is_started_again(rough_cluster: UpProcess) -> None:
    up = rough_cluster
    before = answer_of(up)
    os.kill(up.state.processes["router"], signal.SIGKILL)
    up.wait_for("router ended (SIGKILL)")
    os.kill(up.state.processes["valkey"], signal.SIGKILL)
    up.wait_for("valkey ended (SIGKILL)")
    os.kill(guardian(up.cluster_id).pid, signal.SIGKILL)
    up.wait_for("guardian ended (SIGKILL)")
    os.kill(up.state.processes["decode-0"], signal.SIGKILL)
    up.wait_for("decode-0 is back")
    up.wait_healthy()
    assert answer_of(up) == before
