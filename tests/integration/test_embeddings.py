"""Embeddings of a real cluster, over HTTP: those of one engine alone, and nothing is handed off."""

from __future__ import annotations

import base64
import struct
from pathlib import Path

import httpx
import pytest

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.offline import generate
from router.core.served_model import ServedModel
from tests.support.integration.handoff import BLOCK, prompt_of, reference
from tests.support.mini_cluster import DEADLINE_S, MiniCluster, mini_cluster
from tests.support.router.front_fakes import create_app

PROMPTS = [prompt_of(length) for length in (1, BLOCK, 3 * BLOCK + 5)]
SIZE = 48
ONCE = SamplingParams(temperature=0.0, max_tokens=1)


async def embedded(cluster: MiniCluster, prompts: list[tuple[int, ...]]) -> list[list[float]]:
    app = create_app(
        cluster.dispatcher,
        cluster.tokenizer,
        ServedModel("tiny", 0, 512, SIZE),
        cluster.stats,
        cluster.config,
    )
    transport = httpx.ASGITransport(app)
    body = {"model": "tiny", "input": prompts, "encoding_format": "base64"}
    async with httpx.AsyncClient(
        transport=transport, base_url="http://baton", timeout=DEADLINE_S
    ) as client:
        response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert answer["usage"]["prompt_tokens"] == sum(map(len, prompts))
    raw = [base64.b64decode(one["embedding"]) for one in answer["data"]]
    return [list(struct.unpack(f"<{SIZE}f", each)) for each in raw]


@pytest.mark.parametrize(("prefill", "local"), [(1, "never"), (1, "always"), (0, "auto")])
async def test_they_are_those_of_one_engine(
    tiny_model: Path, redis_url: str, prefill: int, local: str
) -> None:
    specs = [
        SequenceSpec(f"e{n}", 0, "", prompt, len(prompt), ONCE, embeds=True)
        for n, prompt in enumerate(PROMPTS)
    ]
    expected = [output.embedding for output in generate(reference(tiny_model), specs)]
    async with mini_cluster(
        tiny_model, redis_url, prefill=prefill, kv_pool_mib=8, local_prefill=local
    ) as cluster:
        for _ in range(2):
            # The second time all full blocks are cached.
            found = await embedded(cluster, PROMPTS)
            for one, wanted in zip(found, expected, strict=True):
                assert one == pytest.approx(wanted, abs=2e-5)
        where = "prefill-0" if local == "never" else "decode-0"
        assert cluster.value(where, "baton_computed_prompt_tokens_total") > 0
        transport = cluster.config.transport
        handed = "baton_handoff_bytes_total"
        assert cluster.value("decode-0", handed, transport=transport) == 0
        answer = await cluster.answer(PROMPTS[2], ONCE)
        assert len(answer.token_ids) == 1
        await cluster.until_idle()
