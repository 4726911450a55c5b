"""Calls of tools, and the reasoning before them, that go on at another worker in the middle."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.core.served_model import ServedModel
from tests.support.integration.moves import busiest_decode, moved
from tests.support.integration.reasoning_model import CLOSE, NEVER_CLOSE, reasoning_model
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from tests.support.router.front_fakes import create_app
from tests.support.router.reasoning import OPENED, SWITCHED

TEXT = 'Où est la "mer" ? <b>\n' * 8
NOTE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string", "enum": [TEXT, TEXT + "Ici."]},
        "numbers": {
            "type": "array",
            "items": {"type": "integer", "minimum": 100, "maximum": 999},
            "minItems": 60,
            "maxItems": 60,
        },
    },
    "required": ["text", "numbers"],
    "additionalProperties": False,
}
BUDGET = 100
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Note the sea."}],
    "tools": [{"type": "function", "function": {"name": "note", "parameters": NOTE}}],
    "tool_choice": {"type": "function", "function": {"name": "note"}},
    "temperature": 1.0,
    "seed": 7,
    "max_tokens": 1200,
    "logit_bias": NEVER_CLOSE,
    "stream": True,
    "stream_options": {"include_usage": True},
}


async def streamed(cluster: MiniCluster, *, reasons: bool) -> list[dict[str, Any]]:
    """The chunks of one answer."""
    more = {"thinking_token_budget": BUDGET} if reasons else {"enable_thinking": False}
    model = ServedModel.of("tiny", cluster.model)
    app = create_app(cluster.dispatcher, cluster.tokenizer, model, cluster.stats, cluster.config)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        response = await client.post("/v1/chat/completions", json=ASKED | more, timeout=DEADLINE_S)
    assert response.status_code == 200, response.text
    lines = (line.removeprefix("data: ") for line in response.text.splitlines() if line)
    return [json.loads(line) for line in lines if line != "[DONE]"]


def joined(chunks: list[dict[str, Any]]) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """What the deltas say in their order, adjacent pieces of one kind as one, and the usage."""
    told: list[tuple[str, Any]] = []
    for delta in (choice["delta"] for chunk in chunks for choice in chunk["choices"]):
        (call,) = delta.get("tool_calls") or [{"function": {}}]
        if "id" in call:
            told.append(("call", (call["index"], call["function"]["name"])))
        pieces = {**delta, **call["function"]}
        for kind in ("reasoning_content", "content", "arguments"):
            if text := pieces.get(kind):
                before = told.pop()[1] if told and told[-1][0] == kind else ""
                told.append((kind, before + text))
    told += [
        ("finish", choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    usage = chunks[-1]["usage"]
    # The prompt of the second answer is cached.
    del usage["prompt_tokens_details"]
    return told, usage


def token_ids(cluster: MiniCluster) -> list[int]:
    """Those of the one answer so far."""
    return [token for one in cluster.dispatcher._running for token in one.choices[0].token_ids]


@pytest.mark.parametrize(
    ("tools", "template", "place"),
    [
        ("hermes", SWITCHED, "Où est la"),
        pytest.param("qwen3_coder", SWITCHED, "Où est la", marks=pytest.mark.long),
        pytest.param("hermes", OPENED, "", marks=pytest.mark.long),
        pytest.param("hermes", OPENED, "</think>", marks=pytest.mark.long),
        ("glm45", OPENED, "<arg_key>numbers</arg_key>\n<arg_value>["),
    ],
)
async def test_a_call_goes_on_elsewhere(
    tmp_path: Path, redis_url: str, tools: str, template: str, place: str
) -> None:
    """The worker stops when the answer is a little beyond ``place``."""
    model = reasoning_model(tmp_path, template, context=4096)
    reasons = template == OPENED

    def is_there() -> bool:
        found = token_ids(cluster)
        text = cluster.tokenizer.decode(found, skip_special_tokens=False)
        begin = text.find(place)
        return begin >= 0 and len(text) > begin + len(place) + 12

    async with mini_cluster(
        model,
        redis_url,
        prefill=2,
        decode=2,
        kv_pool_mib=8,
        policy="round_robin",
        tool_parser=tools,
    ) as cluster:
        expected = joined(await streamed(cluster, reasons=reasons))
        task = asyncio.create_task(streamed(cluster, reasons=reasons))
        await cluster.until(is_there)
        if not place:
            assert CLOSE not in token_ids(cluster)
        await cluster.workers.pop(busiest_decode(cluster)).stop()
        found = joined(await task)
        assert moved(cluster, "decode_failed") == 1
        await cluster.until_idle()
    assert found == expected
    told, usage = expected
    kinds = dict(told)
    assert kinds["call"] == (0, "note")
    assert kinds["finish"] == "tool_calls"
    arguments = json.loads(kinds["arguments"])
    assert arguments["text"] in NOTE["properties"]["text"]["enum"]
    assert len(arguments["numbers"]) == 60
    counted = usage["completion_tokens_details"]["reasoning_tokens"]
    assert counted == (BUDGET if reasons else 0)
    assert ("reasoning_content" in kinds) is reasons
