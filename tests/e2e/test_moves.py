"""A decode worker of a real cluster ends or hangs amid answers, and no client can tell."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.support.e2e.cluster import UpProcess, processes_of

DEADLINE_S = 120.0
pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

MESSAGES: Any = [{"role": "user", "content": "Tell me of the sea, at length."}]
NOTE: dict[str, Any] = {
    "name": "note",
    "parameters": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 500, "maxLength": 600}},
        "required": ["text"],
        "additionalProperties": False,
    },
}
SCHEMA: Any = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": 99},
    "minItems": 60,
    "maxItems": 60,
}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 250},
    "seeded choices": {"temperature": 1, "seed": 5, "n": 2, "max_tokens": 200, "logprobs": True},
    "tool": {
        "tools": [{"type": "function", "function": NOTE}],
        "tool_choice": {"type": "function", "function": {"name": "note"}},
        "seed": 1,
        "max_tokens": 400,
    },
    "schema": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "numbers", "strict": True, "schema": SCHEMA},
        },
        "seed": 2,
        "max_tokens": 400,
    },
}


@dataclass
class Seen:
    """What a client has seen of an answer."""

    text: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    calls: defaultdict[int, str] = field(default_factory=lambda: defaultdict(str))
    finish: dict[int, str] = field(default_factory=dict)
    scored: int = 0
    usage: Any = None


@pytest.fixture(scope="module")
def own_cluster() -> Iterator[UpProcess]:
    """A cluster of this module's own: it is treated badly."""
    with UpProcess("--prefill", "2", "--decode", "2") as up:
        yield up.wait_ready()


def ask(up: UpProcess, fields: dict[str, Any], is_under_way: threading.Semaphore) -> Seen:
    """Stream an answer; says when its first pieces are there."""
    seen, pieces = Seen(), 0
    with openai.OpenAI(
        base_url=f"{up.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
    ) as client:
        answer = client.chat.completions.create(
            model=up.model,
            messages=MESSAGES,
            stream=True,
            stream_options={"include_usage": True},
            **fields,
        )
        for chunk in answer:
            seen.usage = chunk.usage or seen.usage
            for choice in chunk.choices:
                pieces += 1
                if pieces == 10:
                    is_under_way.release()
                seen.text[choice.index] += choice.delta.content or ""
                for call in choice.delta.tool_calls or ():
                    seen.calls[choice.index] += (call.function and call.function.arguments) or ""
                if choice.logprobs is not None:
                    seen.scored += len(choice.logprobs.content or ())
                if choice.finish_reason:
                    assert choice.index not in seen.finish
                    seen.finish[choice.index] = choice.finish_reason
    return seen


def ask_all(up: UpProcess, disturb: Any = None) -> dict[str, Seen]:
    """All at once; ``disturb`` is called when all are in flight."""
    is_under_way = threading.Semaphore(0)
    with ThreadPoolExecutor(len(ASKED)) as pool:
        found = {name: pool.submit(ask, up, fields, is_under_way) for name, fields in ASKED.items()}
        for _ in ASKED:
            assert is_under_way.acquire(timeout=DEADLINE_S)
        if disturb is not None:
            disturb()
        return {name: future.result() for name, future in found.items()}


def running_at(port: int) -> float | None:
    """The sequences that the decode worker runs whose metrics are at ``port``; None for others."""
    try:
        page = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=2.0).text
    except httpx.HTTPError:
        return None
    found = re.search(
        r'^baton_sequences{.*role="decode",state="running",.*} (\S+)', page, re.MULTILINE
    )
    return float(found[1]) if found and "baton_routable" not in page else None


def decode_workers(up: UpProcess) -> dict[int, psutil.Process]:
    """The processes of the decode workers, by the ports of their metrics."""
    return {
        connection.laddr.port: process
        for process in processes_of(up.cluster_id)
        for connection in process.net_connections()
        if connection.status == "LISTEN" and running_at(connection.laddr.port) is not None
    }


def moved(up: UpProcess) -> float:
    """Requests that were moved, for any reason: which one the router sees first depends on time."""
    page = httpx.get(f"{up.http}/metrics", timeout=DEADLINE_S).text
    found = re.findall(r"^baton_moved_requests_total{[^}]*} (\S+)", page, re.MULTILINE)
    return sum(map(float, found))


@pytest.mark.parametrize("way", ["suspend", "kill"])
def test_no_client_can_tell(own_cluster: UpProcess, way: str) -> None:
    own_cluster.wait_healthy()
    expected = ask_all(own_cluster)
    assert all(len(text) > 100 for text in expected["seeded choices"].text.values())
    assert len(expected["tool"].calls[0]) > 500
    # Looked for first: to find them takes a while.
    workers = decode_workers(own_cluster)
    assert len(workers) == 2
    victims: list[psutil.Process] = []

    def disturb() -> None:
        victims.append(workers[max(workers, key=lambda port: running_at(port) or 0.0)])
        getattr(victims[0], way)()

    try:
        before = moved(own_cluster)
        seen = ask_all(own_cluster, disturb)
        assert moved(own_cluster) > before
    finally:
        if way == "suspend":
            for victim in victims:
                victim.resume()
    for name, answer in seen.items():
        usage, undisturbed = answer.usage, expected[name].usage
        assert usage.completion_tokens == undisturbed.completion_tokens
        assert usage.prompt_tokens == undisturbed.prompt_tokens
        answer.usage = expected[name].usage = None
        assert answer == expected[name], name
    own_cluster.wait_healthy()
