"""Batches and the cache's endpoints against `baton serve` with the real model."""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from baton.client import Client, Message, Sampling
from baton.client.http_api import open_api, open_async_api
from tests.clients.checking import check, chosen
from tests.support.e2e.cluster import BATON, UpProcess, wait_until_gone
from tests.support.http_batches import begin_batch

DEADLINE_S = 120.0
LINES = 6


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


def run_command(*arguments: str) -> str:
    """What `baton batch` says; it must succeed."""
    done = subprocess.run(
        [BATON, "batch", *arguments],
        capture_output=True,
        text=True,
        timeout=2 * DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def check_output(path: Path) -> None:
    rows = [json.loads(row) for row in path.read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"c-{number}" for number in range(LINES)]
    assert all(row["response"]["body"]["usage"]["completion_tokens"] > 0 for row in rows)


def test_a_file_through_the_command(cluster: UpProcess, tmp_path: Path) -> None:
    file, output = written(cluster.model, tmp_path / "in.jsonl"), tmp_path / "out.jsonl"
    http = cluster.http.removeprefix("http://")
    run_command(str(file), "--output", str(output), "--http", http)
    check_output(output)
    # Other requests are served as before, over HTTP and gRPC.
    messages = [{"role": "user", "content": "Name a river."}]
    body = {"model": cluster.model, "messages": messages, "max_tokens": 8}
    with open_api(cluster.http) as client:
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
    assert 0 < usage["completion_tokens"] <= 8
    with Client(cluster.grpc) as grpc:
        answer = grpc.chat([Message("user", "Name a river.")], Sampling(max_tokens=8))
    assert 0 < answer.usage.completion_tokens <= 8


def test_responses_in_a_batch(cluster: UpProcess) -> None:
    body = {"model": cluster.model, "input": "Name a river.", "max_output_tokens": 8, "seed": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    url = f"{cluster.http}/v1"
    with openai.OpenAI(base_url=url, api_key="none", timeout=DEADLINE_S) as client:
        file = client.files.create(file=("in.jsonl", json.dumps(line).encode()), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
        )
        end = time.monotonic() + DEADLINE_S
        while batch.status in ("validating", "in_progress", "finalizing"):
            assert time.monotonic() < end, "the batch did not end"
            time.sleep(0.1)
            batch = client.batches.retrieve(batch.id)
        assert batch.status == "completed"
        assert batch.output_file_id is not None
        told = json.loads(client.files.content(batch.output_file_id).text)["response"]["body"]
        answer = client.responses.create(
            model=cluster.model,
            input="Name a river.",
            max_output_tokens=8,
            extra_body={"seed": 1},
        )
    assert answer.usage is not None
    assert told["usage"]["output_tokens"] == answer.usage.output_tokens > 0


def test_the_cache_is_shown_and_dropped(cluster: UpProcess) -> None:
    prompt = "One two three four five six seven eight nine ten. " * 8
    with open_api(cluster.http) as client:
        client.post("/v1/completions", json={"model": cluster.model, "prompt": prompt})
    stats = httpx.get(f"{cluster.http}/v1/cache/stats", timeout=DEADLINE_S).json()
    assert stats["prompt_tokens"] > 0
    assert {one["slot"] for one in stats["workers"]} == {"prefill-0", "decode-0"}
    dropped = httpx.delete(f"{cluster.http}/v1/cache", timeout=DEADLINE_S).json()["workers"]
    assert {one["slot"] for one in dropped} == {"prefill-0", "decode-0"}
    assert all(one["error"] is None for one in dropped)


async def begun(url: str, content: bytes) -> dict[str, Any]:
    async with open_async_api(url) as client:
        return await begin_batch(client, content, "/v1/chat/completions")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_batch_goes_on_after_the_cluster_was_started_again(tmp_path: Path) -> None:
    env = {"BATON_DATA_DIR": str(tmp_path / "data")}
    file, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with UpProcess(env=env) as first:
        http = first.wait_ready().http.removeprefix("http://")
        content = written(first.model, file).read_bytes()
        batch = asyncio.run(begun(first.http, content))
        first.terminate()
        assert first.wait() == 0
        assert wait_until_gone(first.cluster_id) == []
    with UpProcess("--http", http, env=env) as again:
        again.wait_ready()
        run_command("--id", batch["id"], "--http", http, "--output", str(output))
    check_output(output)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_other_peoples_clients(tmp_path: Path) -> None:
    """Those of the table that are light: installed by `make test-clients`, not by this."""
    ready = [program for program in chosen("light") if program.installed]
    if not ready:
        pytest.skip("make test-clients has installed none")
    with UpProcess(env={"BATON_DATA_DIR": str(tmp_path)}) as up:
        up.wait_ready()
        outcomes = [o for program in ready for o in check(program, up.http, up.model, "")]
    assert [one for one in outcomes if one.outcome == "fail"] == []
