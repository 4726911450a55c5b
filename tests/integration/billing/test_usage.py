"""Usage, feedback and the time of devices, as clients and operators read them."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Any

import pytest

from baton import errors
from baton.store.redis_client import redis_client
from router.usage.usage_store import Feedback
from tests.support.integration.billing import (
    DAY,
    DEADLINE_S,
    PROMPT,
    Cluster,
    key_of,
    until_reported,
)
from tests.support.mini_cluster import free_port


async def test_the_time_of_devices_counts_once_for_all_routers(cluster: Cluster) -> None:
    router = cluster.router()
    for _ in range(4):
        await router.store.count_devices({"prefill": 2, "decode": 4})
        await asyncio.sleep(0.05)
    seconds = await router.store.device_seconds([DAY])
    assert 0.1 <= seconds["prefill"] < DEADLINE_S
    assert seconds["decode"] == pytest.approx(2 * seconds["prefill"])


async def test_a_tenant_sees_its_own_usage_and_an_operator_all(cluster: Cluster) -> None:
    digest = hashlib.sha256(b"op").hexdigest()
    operator = {"name": "op", "tenant": "default", "sha256": digest, "scopes": ["admin"]}
    other = {"name": "o", "tenant": "default", "sha256": hashlib.sha256(b"o").hexdigest()}
    router = cluster.router(keys=[key_of(), operator, other], require_key=True)
    await router.store.count_devices({"decode": 1})
    async with router.app() as http:
        for secret in ("a-key", "o"):
            shown = {"authorization": f"Bearer {secret}"}
            await http.post("/v1/completions", json=PROMPT, headers=shown)
        await until_reported(router)
        seen = {}
        for secret in ("a-key", "o", "op"):
            shown = {"authorization": f"Bearer {secret}"}
            answer = await http.get("/v1/usage?by=tenant", headers=shown)
            report = answer.json()
            seen[secret] = [row["tenant"] for row in report["data"]]
            assert ("device_hours" in report) == (secret == "op")
        assert seen == {"a-key": ["acme"], "o": ["default"], "op": ["acme", "default"]}
        assert (await http.get("/v1/usage", headers={"authorization": ""})).status_code == 401


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("by=color", "by must list some of day, tenant, key, class, agent"),
        ("by=day,day", "each once"),
        ("start=yesterday", "start must be a day"),
        ("start=2026-11-19", "start must not be after end"),
        ("start=2026-01-01", "at most 92 days apart"),
    ],
)
async def test_questions_that_make_no_sense(cluster: Cluster, query: str, message: str) -> None:
    async with cluster.router().app() as http:
        answer = await http.get(f"/v1/usage?{query}")
        assert answer.status_code == 400
        assert message in answer.json()["error"]["message"]


async def test_feedback_makes_a_cost_per_success(cluster: Cluster) -> None:
    router = cluster.router()
    async with router.app() as http:
        ids = []
        for _ in range(3):
            body = PROMPT | {"metadata": {"agent": "wrîter/1"}}
            ids.append((await http.post("/v1/completions", json=body)).json()["id"])
        await until_reported(router)
        for told in (
            {"id": ids[0], "success": False, "score": 0.25},
            {"id": ids[0], "success": True, "score": 0.5, "comment": "second thoughts"},
            {"id": ids[0], "success": True, "score": 0.5, "comment": "second thoughts"},
            {"id": ids[1], "success": False},
        ):
            answer = await http.post("/v1/feedback", json=told)
            assert answer.status_code == 200, answer.text
        (row,) = (await http.get("/v1/usage?by=agent")).json()["data"]
        assert (row["agent"], row["successes"], row["failures"]) == ("wrîter/1", 1, 1)
        assert row["mean_score"] == 0.5
        assert row["cost_per_success"] == row["cost"]
        kept = (await http.get(f"/v1/feedback/{ids[0]}")).json()
        assert (kept["success"], kept["comment"]) == (True, "second thoughts")
        assert (await http.get(f"/v1/feedback/{ids[2]}")).status_code == 404
        # Another tenant has no such answer.
        with pytest.raises(errors.NotFound):
            await router.store.rate("default", ids[0], Feedback(True))
        router.now[0] += 26 * 3600
        answer = await http.post("/v1/feedback", json={"id": ids[0], "success": True})
        assert answer.status_code == 404
        assert "for a day" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "told",
    [
        {"id": "x"},
        {"id": "", "success": True},
        {"id": "x" * 129, "success": True},
        {"id": "x", "success": "yes"},
        {"id": "x", "success": True, "score": 2},
        {"id": "x", "success": True, "comment": "x" * 1001},
        {"id": "x", "success": True, "color": "red"},
    ],
)
async def test_feedback_is_bounded(cluster: Cluster, told: dict[str, Any]) -> None:
    async with cluster.router().app() as http:
        assert (await http.post("/v1/feedback", json=told)).status_code == 400


async def test_without_redis_usage_is_unavailable(tmp_path: Path) -> None:
    client = redis_client(f"redis://127.0.0.1:{free_port()}/0")
    router = Cluster(client, tmp_path).router()
    async with router.app() as http:
        assert (await http.get("/v1/usage")).status_code == 503
        told = {"id": "x", "success": True}
        assert (await http.post("/v1/feedback", json=told)).status_code == 503
    await router.close()
    await client.aclose()
