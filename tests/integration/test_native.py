"""What real engines report: how an answer was made, the caches of workers, the model."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.speculation import speculation
from router.access.access import Access
from router.admin.cache import CacheControl
from router.core.served_model import ServedModel
from router.inference.service import InferenceService
from router.routes import Apis, make_apps
from tests.support.engine.drafters import WholeDrafts
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from tests.support.models import make_tiny_model

CONTEXT = 512
PROMPT = "ab" * 60
"""It repeats, so that there is something to draft from."""

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), head_dim=16)


def client_of(cluster: MiniCluster) -> httpx.AsyncClient:
    model = ServedModel("tiny", 0, CONTEXT, 8)
    access = Access(cluster.config, cluster.metrics)
    service = InferenceService(
        cluster.dispatcher, cluster.tokenizer, model, cluster.stats, cluster.config, access
    )
    apps = make_apps(Apis.of(service), cluster.dispatcher, cluster.metrics, cluster.cluster_id)
    transport = httpx.ASGITransport(apps.http)
    return httpx.AsyncClient(transport=transport, base_url="http://baton", timeout=DEADLINE_S)


async def ask(client: httpx.AsyncClient, **changes: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 80, "temperature": 0, **changes}
    answer = await client.post("/v1/generate", json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


async def test_what_was_done_is_reported(
    tiny: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a busy machine steps take so long that drafts do not pay.
    monkeypatch.setattr(speculation, "DraftLength", WholeDrafts)
    flags: dict[str, Any] = {"kv_pool_mib": 8, "heartbeat_s": 0.2, "dtype": "bfloat16"}
    async with (
        mini_cluster(tiny, redis_url, drafter="ngram", quantization="int8", **flags) as cluster,
        client_of(cluster) as client,
    ):
        info = (await client.get("/v1/model/info")).json()
        kinds = (info["quantization"], info["dtype"], info["kv_dtype"])
        assert kinds == ("int8", "bfloat16", "bfloat16")
        assert info["batch_size"] == 64
        (fingerprint,) = {one.fingerprint for one in cluster.dispatcher.worker_records()}
        assert info["fingerprint"] == fingerprint
        assert len(fingerprint) == 32

        def speculated(what: str) -> float:
            name = f"baton_speculation_{what}_tokens_total"
            return cluster.value("decode-0", name, drafter="ngram")

        first = await ask(client)
        used = first["optimization_used"].split(",")
        assert used[0] == "continuous_batching"
        assert used[-1] == "quantization=int8"
        assert "prefix_cache" not in used
        assert speculated("accepted") > 0, "the model repeats itself"
        assert "speculation=ngram" in used

        again = await ask(client)
        assert "prefix_cache" in again["optimization_used"].split(",")
        assert again["text"] == first["text"]

        drafted = speculated("drafted")
        plain = await ask(client, optimization="basic")
        assert plain["optimization_used"] == "continuous_batching,quantization=int8"
        assert plain["text"] == first["text"]
        assert speculated("drafted") == drafted

        control = CacheControl(cluster.dispatcher.workers.all, cluster.index, cluster.metrics)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                stats = {one.slot: one for one in (await control.stats()).workers}
                if stats["prefill-0"].prompt_tokens == 3 * len(cluster.tokenizer.encode(PROMPT)):
                    break
                await asyncio.sleep(0.02)
        prefill = stats["prefill-0"]
        assert 0 < prefill.cached_prompt_tokens < prefill.prompt_tokens / 2
        assert prefill.cached_prompt_tokens % prefill.block_size == 0
        pool = cluster.workers["prefill-0"].context
        assert pool is not None
        assert prefill.block_bytes == pool.engine.cache.block_bytes
        assert prefill.size_bytes == prefill.entries * prefill.block_bytes > 0
        await cluster.until_idle()


async def test_a_batch_runs_side_by_side(tiny: Path, redis_url: str) -> None:
    async with (
        mini_cluster(tiny, redis_url, kv_pool_mib=8) as cluster,
        client_of(cluster) as client,
    ):
        prompts = [f"{letter}bc" for letter in "abcd"]
        body = {"prompts": prompts, "max_tokens": 5, "temperature": 0}
        answer = (await client.post("/v1/generate/batch", json=body)).json()
        alone = [await ask(client, prompt=one, max_tokens=5) for one in prompts]
        assert [one["text"] for one in answer["results"]] == [one["text"] for one in alone]
        tokens = sum(one["tokens_generated"] for one in answer["results"])
        seconds = answer["total_latency_ms"] / 1e3
        assert answer["throughput_tokens_per_sec"] == pytest.approx(tokens / seconds, rel=0.01)
