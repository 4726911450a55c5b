"""A cluster of timed workers: real processes that answer, hand off, change roles and leave."""

from __future__ import annotations

import httpx
import psutil
import pytest

from loadtest.common.peer_servers import SERVED_NAME
from loadtest.research.timed.cluster import TimedCluster, TimedSettings, timed_cluster
from worker.costs.step_costs import StepCosts

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]

DEADLINE_S = 60.0
COSTS = StepCosts(prefill=(5.0, 0.02, 0.0), step=(5.0, 0.5, 0.0))


async def answer(cluster: TimedCluster, prompt: str, tokens: int = 12) -> str:
    body = {"model": SERVED_NAME, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False, timeout=DEADLINE_S) as http:
        response = await http.post(f"http://{cluster.router.http}/v1/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return str(response.json()["choices"][0]["text"])


async def test_its_workers_answer_change_roles_leave_and_end() -> None:
    settings = TimedSettings(2, 1, COSTS, config={"local_prefill": "never"})
    prompt = "a" * 700
    async with timed_cluster(settings) as cluster:
        first = await answer(cluster, prompt)
        assert len(first) == 12
        steps = {slot: await cluster.steps(slot) for slot in cluster.workers}
        computed = [slot for slot in steps if len(steps[slot].asked_s)]
        # The prompt was computed by one, and its tokens by the other.
        assert len(computed) == 2
        assert "decode-0" in computed
        assert len(steps["decode-0"].asked_s) >= 11
        assert (steps["decode-0"].took_s >= steps["decode-0"].asked_s).all()

        await cluster.change_role("prefill-1", "decode")
        assert await cluster.drain("decode-0")
        roles = {"prefill-0": "prefill", "prefill-1": "decode"}
        await cluster.until_serving(roles)
        assert await answer(cluster, prompt) == first
        assert len((await cluster.steps("prefill-1")).asked_s) >= 11

        await cluster.start_worker("decode", "decode-0")
        await cluster.until_serving(roles | {"decode-0": "decode"})
        assert await answer(cluster, prompt) == first
        pids = [worker.hello["pid"] for worker in cluster.workers.values()]
        pids.append(cluster.router.process.pid)
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
