"""Tenants on real workers: what one has asked shows another nothing, by no way that it has."""

from __future__ import annotations

import hashlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from baton.config.access import KeyConfig, TenantConfig
from router.access.access import Access
from router.core.request import OutputDelta
from router.core.served_model import ServedModel
from tests.support.integration.handoff import BLOCK, SAMPLINGS, prompt_of
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from tests.support.router.front_fakes import create_app

MODEL = ServedModel(id="tiny", created=1_700_000_000, context_length=512, embedding_size=8)
BLOCKS = 4
ROUNDS = 24


def key(name: str, tenant: str) -> KeyConfig:
    return KeyConfig(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=tenant)


FIELDS: dict[str, Any] = {
    "tenants": (TenantConfig(name="acme"), TenantConfig(name="rival")),
    "keys": (key("ann", "acme"), key("amy", "acme"), key("rob", "rival")),
    "require_key": True,
}


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client and the workers' own counters report of one request, except its time."""

    computed: float
    """Prompt tokens, by all workers."""
    body: dict[str, Any]
    headers: dict[str, str]


class Clients:
    """All views of one cluster."""

    def __init__(self, cluster: MiniCluster, http: httpx.AsyncClient) -> None:
        self._cluster = cluster
        self._http = http

    async def ask(self, name: str, prompt: tuple[int, ...]) -> Seen:
        before = self._computed()
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": 3, "temperature": 0}
        shown = {"authorization": f"Bearer {name}"}
        answer = await self._http.post("/v1/completions", json=body, headers=shown)
        assert answer.status_code == 200, answer.text
        await self._cluster.until_idle()
        told = answer.json() | {"id": "", "created": 0}
        # The answers are of several lengths.
        headers = dict(answer.headers) | {"x-request-id": "", "content-length": ""}
        return Seen(self._computed() - before, told, headers)

    def _computed(self) -> float:
        name = "baton_computed_prompt_tokens_total"
        return sum(self._cluster.value(slot, name) for slot in self._cluster.workers)


@asynccontextmanager
async def clients_of(model: Path, redis_url: str, **changes: Any) -> AsyncIterator[Clients]:
    async with mini_cluster(model, redis_url, **(FIELDS | changes)) as cluster:
        access = Access(cluster.config, cluster.metrics)
        app = create_app(
            cluster.dispatcher, cluster.tokenizer, MODEL, cluster.stats, cluster.config, access
        )
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://127.0.0.1", timeout=DEADLINE_S
        ) as http:
            yield Clients(cluster, http)


@pytest.mark.parametrize("local", ["never", "always"])
async def test_another_tenants_hit_looks_like_a_miss(
    tiny_model: Path, redis_url: str, local: str
) -> None:
    """Of prompts that a tenant has or has not asked, chosen by a coin, another sees the very same:

    the work, the answer, the usage, the headers. A key of the same tenant sees each of them.
    """
    coin = random.Random(7)
    seen: dict[bool, set[tuple[str, ...]]] = {True: set(), False: set()}
    own: dict[bool, set[float]] = {True: set(), False: set()}
    async with clients_of(tiny_model, redis_url, local_prefill=local) as clients:
        for number in range(ROUNDS):
            prompt = (number + 5, *prompt_of(BLOCKS * BLOCK + 3)[1:])
            asked = coin.random() < 0.5
            first = await clients.ask("ann", prompt) if asked else None
            other = await clients.ask("rob", prompt)
            again = await clients.ask("amy", prompt)
            seen[asked].add((str(other.computed), str(_but_text(other)), str(other.headers)))
            own[asked].add(again.computed)
            assert _cached(other) == 0
            assert other.body["choices"] == again.body["choices"]
            assert again.computed == (3 if asked else BLOCKS * BLOCK + 3)
            if first is not None:
                assert (first.computed, _but_text(first)) == (other.computed, _but_text(other))
    assert len(seen[True]) == 1
    assert seen[True] == seen[False]
    assert max(own[True]) < min(own[False])


def _cached(one: Seen) -> int:
    return int(one.body["usage"]["prompt_tokens_details"]["cached_tokens"])


def _but_text(one: Seen) -> dict[str, Any]:
    return one.body | {"choices": []}


def _scores(answer: OutputDelta) -> list[float]:
    """The log probability of each token, and those of the two best ones at its place."""
    scored = [one.logprobs for one in answer.scored]
    return [number for one in scored for number in (one.logprob, *(best for _, best in one.top))]


async def test_what_a_block_held_is_never_read(tiny_model: Path, redis_url: str) -> None:
    """Blocks are not zeroed when they change hands: whatever they hold, every slot that attention
    reads was written for its own sequence. So answers are the same over memory full of zeros and
    full of another's values, and log probabilities differ by no more than from run to run.
    """
    sampling = replace(SAMPLINGS["greedy"], logprobs=2)
    prompts = [prompt_of(length) for length in (1, BLOCK - 1, BLOCK, 3 * BLOCK + 5)]
    told = []
    for poison in (0.0, 37.5, -1e4):
        async with mini_cluster(tiny_model, redis_url, kv_pool_mib=8) as cluster:
            for worker in cluster.workers.values():
                assert worker.context is not None
                memory = worker.context.engine.cache.bytes.view(torch.float32)
                memory.fill_(poison)
            answers = [await cluster.answer(prompt, sampling) for prompt in prompts]
            told.append(answers)
            await cluster.until_idle()
    for zeros, *others in zip(*told, strict=True):
        assert len(_scores(zeros)) == 3 * len(zeros.token_ids) > 0
        for other in others:
            assert other.token_ids == zeros.token_ids
            assert _scores(other) == pytest.approx(_scores(zeros), abs=1e-4)
