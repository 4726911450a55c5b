"""Every endpoint with a body, before real workers: requests are answered, and nothing fails."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.access.access import Access
from router.app import make_application
from router.core.served_model import ServedModel
from tests.fuzz.bodies import BODIES, plausible_body
from tests.fuzz.openapi import router_model
from tests.support.mini_cluster import DEADLINE_S, mini_cluster
from tests.support.router.front_fakes import service_of

COUNT = 24
"""Bodies for each endpoint."""
MODEL = ServedModel("tiny", 0, 512, 48)
REFUSED = frozenset({"/v1/batches", "/v1/feedback", "/console/what-if"})
"""They need an uploaded file, an answer, and a simulator."""


@asynccontextmanager
async def client_of(model: Path, redis_url: str, data: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of all endpoints; the workers are idle when it is done."""
    async with mini_cluster(model, redis_url, data_dir=str(data), local_prefill="auto") as cluster:
        access = Access(cluster.config, cluster.metrics)
        parts = (cluster.dispatcher, cluster.tokenizer, MODEL, cluster.stats, cluster.config)
        made = make_application(
            cluster.dispatcher,
            service_of(*parts, access),
            cluster.stats,
            cluster.redis,
            cluster.cluster_id,
        )
        transport = httpx.ASGITransport(made.apps.http)
        try:
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1", timeout=DEADLINE_S
            ) as http:
                yield http
            await cluster.until_idle()
        finally:
            await made.console.close()
            await made.batches.close()


async def test_plausible_bodies(
    tmp_path: Path, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    statuses: dict[str, Counter[int]] = {path: Counter() for path in BODIES}
    failed: list[tuple[str, dict[str, Any], str]] = []
    async with client_of(router_model(tmp_path), redis_url, tmp_path / "data") as http:
        for path in BODIES:
            for number in range(COUNT):
                body = plausible_body(random.Random(f"{path}-{number}"), path, MODEL.id)
                answer = await http.post(path, json=body)
                statuses[path][answer.status_code] += 1
                if answer.status_code >= 500 or '"code":"internal' in answer.text:
                    failed.append((path, body, answer.text))
        for path in ("/v1/usage", "/v1/cache/stats", "/metrics/summary", "/load", "/v1/model/info"):
            assert (await http.get(path)).status_code == 200, path
    assert failed == []
    assert not [record for record in caplog.records if record.exc_info]
    served = {path: counts[200] for path, counts in statuses.items() if path not in REFUSED}
    assert min(served.values()) >= COUNT / 3, served


async def test_what_is_made_is_found_and_deleted(tmp_path: Path, redis_url: str) -> None:
    """Ids of one endpoint's answers are taken by others."""
    async with client_of(router_model(tmp_path), redis_url, tmp_path / "data") as http:
        prefixes = "/v1/cache/prefixes"
        pinned = await http.post(prefixes, json={"prompt": list(range(5, 45)), "ttl": 60})
        assert pinned.status_code == 200, pinned.text
        place = f"{prefixes}/{pinned.json()['id']}"
        listed = (await http.get(prefixes)).json()["data"]
        assert [one["id"] for one in listed] == [pinned.json()["id"]]
        assert (await http.delete(place)).json()["deleted"]
        assert (await http.delete(place)).status_code == 404
        other = await http.post("/v1/feedback", json={"id": "gen-1", "success": True})
        assert (other.status_code, other.json()["error"]["param"]) == (404, "id")
        day = time.strftime("%Y-%m-%d", time.gmtime())
        usage = (await http.get("/v1/usage", params={"start": day, "end": day})).json()
        assert (usage["start"], usage["object"]) == (day, "usage")
