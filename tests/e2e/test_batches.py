"""Batches and the cache's endpoints against `baton up` with the real model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from baton.client import Client, HttpClient, Message, Sampling
from loadtest.clients.checking import check, chosen
from tests.e2e.cluster import BATON, UpProcess, wait_until_gone

DEADLINE_S = 60.0
LINES = 24


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[UpProcess]:
    """A cluster with a data folder of its own."""
    with UpProcess(env={"BATON_DATA_DIR": str(tmp_path / "data")}) as up:
        yield up.wait_ready()


def written(model: str, path: Path) -> Path:
    rows = [
        {
            "custom_id": f"c-{number}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                "model": model,
                "messages": [{"role": "user", "content": f"Count to {number + 2}."}],
                "max_tokens": 16,
                "seed": number,
            },
        }
        for number in range(LINES)
    ]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_a_file_through_the_command_and_after_a_restart(kept: UpProcess, tmp_path: Path) -> None:
    file, output = written(kept.model, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    http = kept.http.removeprefix("http://")
    done = subprocess.run(
        [BATON, "batch", str(file), "--output", str(output), "--http", http],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in output.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"c-{number}" for number in range(LINES)]
    batch_id = done.stderr.split()[1].rstrip(":")
    with HttpClient(kept.http) as client, Client(kept.grpc) as grpc:
        # Somebody in a hurry is served as ever, over both fronts.
        for one in (client, grpc):
            answer = one.chat([Message("user", "Name a river.")], Sampling(max_tokens=8))
            assert answer.usage.completion_tokens <= 8
        stats = httpx.get(f"{kept.http}/v1/cache/stats", timeout=DEADLINE_S).json()
        assert stats["index"]["blocks"] > 0
        dropped = httpx.delete(f"{kept.http}/v1/cache", timeout=DEADLINE_S).json()["workers"]
        assert {one["slot"] for one in dropped} == {"prefill-0", "decode-0"}
        assert all(one["error"] is None for one in dropped)
        unfinished = client.create_batch(client.upload(file.read_bytes()).id)
    kept.terminate()
    assert kept.wait() == 0
    assert wait_until_gone(kept.cluster_id) == []
    with (
        UpProcess("--http", http, env={"BATON_DATA_DIR": str(tmp_path / "data")}) as again,
        HttpClient(again.wait_ready().http) as client,
    ):
        assert client.batch(batch_id).completed == LINES
        done = subprocess.run(
            [BATON, "batch", "--id", unfinished.id, "--http", http, "--output", str(output)],
            capture_output=True,
            text=True,
            timeout=2 * DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        same = [json.loads(row) for row in output.read_text().splitlines()]
        assert [row["custom_id"] for row in same] == [row["custom_id"] for row in rows]


@pytest.mark.long
def test_other_peoples_clients() -> None:
    """Those of the table that are light: installed by `make test-clients`, not by this."""
    ready = [program for program in chosen("light") if program.installed]
    if not ready:
        pytest.skip("make test-clients has installed none")
    with UpProcess() as up:
        up.wait_ready()
        outcomes = [o for program in ready for o in check(program, up.http, up.model, "")]
    assert [one for one in outcomes if one.outcome == "fail"] == []
