"""Reasoning over real workers: budgets kept by the engine, whole, handed off and moved."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest

from baton.config.cluster import Config
from baton.reasoning import ReasoningSpan
from router.core.served_model import ServedModel
from tests.support.integration.handoff import prompt_of
from tests.support.integration.moves import LONG, STRICT, Asked, busiest_decode, moved
from tests.support.integration.reasoning_model import CLOSE, NEVER_CLOSE, OPEN, reasoning_model
from tests.support.mini_cluster import MiniCluster, mini_cluster
from tests.support.models import EOS
from tests.support.router.front_fakes import create_app
from tests.support.router.reasoning import OPENED, SWITCHED

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"],
    "additionalProperties": False,
}
PATHS = pytest.mark.parametrize("local_prefill", ["never", "always"])


async def chat(cluster: MiniCluster, **fields: Any) -> dict[str, Any]:
    """The answer of the HTTP API, whole."""
    model = ServedModel.of("tiny", cluster.model)
    config = Config()
    app = create_app(cluster.dispatcher, cluster.tokenizer, model, cluster.stats, config)
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello"}],
        "logit_bias": NEVER_CLOSE,
        "return_token_ids": True,
        **fields,
    }
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://baton") as client:
        response = await client.post("/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


@PATHS
async def test_a_budget_is_kept_to_the_token(
    tmp_path: Path, redis_url: str, local_prefill: str
) -> None:
    model = reasoning_model(tmp_path, OPENED)
    async with mini_cluster(model, redis_url, local_prefill=local_prefill) as cluster:
        for budget in (0, 1, 37):
            body = await chat(
                cluster, thinking_token_budget=budget, max_tokens=60, n=2, temperature=1, seed=5
            )
            for choice in body["choices"]:
                assert choice["token_ids"].index(CLOSE) == budget
                assert len(choice["token_ids"]) == 60
                assert ("reasoning" in choice["message"]) is (budget > 0)
                assert choice["message"]["content"]
            details = body["usage"]["completion_tokens_details"]
            assert details == {"reasoning_tokens": 2 * budget}
        await cluster.until_idle()


@PATHS
async def test_a_schema_is_for_the_content(
    tmp_path: Path, redis_url: str, local_prefill: str
) -> None:
    model = reasoning_model(tmp_path, SWITCHED)
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    async with mini_cluster(model, redis_url, local_prefill=local_prefill) as cluster:
        # Its first token is likely, whatever the random model would say.
        bias = {**NEVER_CLOSE, str(OPEN): 100}
        begins = {"temperature": 0, "response_format": form, "logit_bias": bias}
        body = await chat(cluster, thinking_token_budget=20, **begins)
        (choice,) = body["choices"]
        assert choice["token_ids"][0] == OPEN
        assert choice["token_ids"].index(CLOSE) == 21
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 20}
        at_once = await chat(cluster, enable_thinking=False, **begins)
        jsonschema.validate(json.loads(at_once["choices"][0]["message"]["content"]), SCHEMA)
        assert at_once["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        await cluster.until_idle()


async def test_budgets_survive_a_move(tiny_model: Path, redis_url: str) -> None:
    """Before the end of the reasoning, amid the tokens that are forced, and behind them."""
    forced = tuple(range(OPEN, OPEN + 8))
    span = ReasoningSpan((forced,), budget=40, forced=forced)
    never = ((EOS, -100.0),)
    asked = (
        Asked(prompt_of(40, 1), LONG, 2, reasoning=span),
        Asked(prompt_of(30, 2), replace(LONG, logit_bias=never), reasoning=replace(span, budget=3)),
        Asked(
            prompt_of(20, 3), replace(STRICT, logit_bias=never), reasoning=replace(span, budget=2)
        ),
    )
    async with mini_cluster(
        tiny_model, redis_url, prefill=2, decode=2, kv_pool_mib=8, policy="round_robin"
    ) as cluster:
        tasks = [asyncio.create_task(each.run(cluster)) for each in asked]
        await cluster.until(lambda: all(each.has(6) for each in asked))
        await cluster.workers.pop(busiest_decode(cluster)).stop()
        await asyncio.gather(*tasks)
        assert moved(cluster, "decode_failed") >= 1
        await cluster.until_idle()
    for each in asked:
        each.check(tiny_model)
        budget = each.reasoning.budget if each.reasoning else 0
        assert budget is not None
        for choice in each.choices.values():
            assert tuple(choice.token_ids[budget : budget + 8]) == forced
