"""Processes of a real cluster are killed: clients get an answer or a clear error, and it heals."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tests.e2e.cluster import UpProcess, processes_of

DEADLINE_S = 60.0


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[UpProcess]:
    """A cluster of this module's own: it is treated badly."""
    with UpProcess() as up:
        yield up.wait_ready()


def worker_process(up: UpProcess, slot: str) -> psutil.Process:
    """The process that serves a slot's metrics page."""
    page = httpx.get(f"{up.http}/metrics/cluster", timeout=DEADLINE_S).text
    assert re.search(f'worker="{slot}"', page)
    role = slot.split("-", maxsplit=1)[0]
    for process in processes_of(up.cluster_id):
        ports = {c.laddr.port for c in process.net_connections() if c.status == "LISTEN"}
        for port in ports:
            try:
                text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2.0).text
            except httpx.HTTPError:
                continue
            if f'role="{role}"' in text and "baton_kv_blocks{" in text and "routable" not in text:
                return process
    raise AssertionError(f"no process of worker {slot}")


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


@pytest.mark.parametrize("slot", ["decode-0", "prefill-0"])
def test_a_killed_worker_comes_back(own_cluster: UpProcess, slot: str) -> None:
    own_cluster.wait_healthy()
    # Looked for first, and a decode worker has much to do: it must not end before it is killed.
    victim = worker_process(own_cluster, slot)
    lines = stream(own_cluster, 1800 if slot.startswith("decode") else 400)
    first = next(lines)
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"]
    for _ in range(5):
        next(lines)
    victim.kill()
    rest = list(lines)
    if slot.startswith("decode"):
        # Never a clean end without a finish reason.
        assert "error" in json.loads(rest[-1].removeprefix("data: "))
    else:
        assert rest[-1] == "data: [DONE]"
    own_cluster.wait_healthy()
    again = list(stream(own_cluster, 5))
    assert again[-1] == "data: [DONE]"
